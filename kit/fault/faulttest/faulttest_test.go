// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package faulttest

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"reflect"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/sluice-net/sluice/kit/fault"
	"github.com/sluice-net/sluice/kit/leaktest"
)

var (
	pointA = fault.Register("test.a")
	pointB = fault.Register("test.b")
)

const childArg = "faulttest-child"

func TestMain(m *testing.M) {
	if len(os.Args) > 1 && os.Args[1] == childArg {
		if err := fault.Arm(); err != nil {
			fmt.Println("refused:", err)
			os.Exit(3)
		}
		fmt.Println("armed", fault.Armed())
		ctx, cancel := context.Background(), context.CancelFunc(func() {})
		if len(os.Args) > 2 {
			ctx, cancel = context.WithTimeout(ctx, 20*time.Millisecond)
		}
		defer cancel()
		for range 3 {
			fmt.Println("a", pointA.Hit(ctx))
		}
		fmt.Println("b", pointB.Hit(context.Background()))
		return
	}
	leaktest.Main(m)
}

func child(args ...string) (*exec.Cmd, *strings.Builder) {
	cmd := exec.Command("/proc/self/exe", append([]string{childArg}, args...)...)
	cmd.Env = append(os.Environ(), "GORACE=atexit_sleep_ms=0") // by default, -race sleeps a second at exit
	out := &strings.Builder{}
	cmd.Stdout = out
	return cmd, out
}

func within(t *testing.T) context.Context {
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	t.Cleanup(cancel)
	return ctx
}

func TestPointsPassWithoutAController(t *testing.T) {
	cmd, out := child()
	want := "armed false\na <nil>\na <nil>\na <nil>\nb <nil>\n"
	if err := cmd.Run(); err != nil || out.String() != want {
		t.Fatalf("child: %v, said %q, want %q", err, out, want)
	}
}

func TestDescriptorThatIsNoControllerIsLeftAlone(t *testing.T) {
	r, w, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	defer r.Close()
	fds, err := syscall.Socketpair(syscall.AF_UNIX, syscall.SOCK_SEQPACKET|syscall.SOCK_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	ours, theirs := os.NewFile(uintptr(fds[0]), "a"), os.NewFile(uintptr(fds[1]), "b")
	defer ours.Close()
	if _, err := ours.Write([]byte("hello")); err != nil {
		t.Fatal(err)
	}
	for _, f := range []*os.File{w, theirs} {
		cmd, out := child()
		cmd.ExtraFiles = []*os.File{f}
		if err := cmd.Run(); err != nil || !strings.HasPrefix(out.String(), "armed false\n") {
			t.Errorf("descriptor %s: %v, said %q", f.Name(), err, out)
		}
	}
	buf := make([]byte, 16)
	if n, err := theirs.Read(buf); err != nil || string(buf[:n]) != "hello" {
		t.Errorf("the message on the foreign socket is %q, %v; it must still be there", buf[:n], err)
	}
	w.Close()
	theirs.Close()
	if b, err := io.ReadAll(r); err != nil || len(b) != 0 {
		t.Errorf("the pipe has %q, %v", b, err)
	}
}

func TestKillEndsTheProcessAtThePoint(t *testing.T) {
	cmd, out := child()
	c := New(t, cmd)
	c.KillAt("test.a", 2)
	err := cmd.Run()
	c.Started()
	var exit *exec.ExitError
	if !errors.As(err, &exit) || exit.Sys().(syscall.WaitStatus).Signal() != syscall.SIGKILL {
		t.Fatalf("child ended with %v, want SIGKILL", err)
	}
	if want := "armed true\na <nil>\na <nil>\n"; out.String() != want {
		t.Errorf("child said %q, want %q", out, want)
	}
	if c.Hits("test.a") != 3 || c.Hits("test.b") != 0 {
		t.Errorf("hits are %d and %d, want 3 and 0", c.Hits("test.a"), c.Hits("test.b"))
	}
	if err := c.WaitHits(within(t), "test.b", 1); err == nil {
		t.Error("WaitHits did not notice the end of the process")
	}
}

func TestErrorIsReturnedByThePoint(t *testing.T) {
	cmd, out := child()
	c := New(t, cmd)
	c.FailAt("test.b", 0, "disk on fire")
	if err := cmd.Run(); err != nil {
		t.Fatal(err)
	}
	if !strings.Contains(out.String(), "b injected fault at test.b: disk on fire\n") {
		t.Errorf("child said %q", out)
	}
	names, err := c.Names(within(t))
	if want := []string{"test.a", "test.b"}; err != nil || !reflect.DeepEqual(names, want) {
		t.Errorf("Names = %q, %v; want %q", names, err, want)
	}
}

func TestBlockedProcessGoesOnWhenReleased(t *testing.T) {
	cmd, out := child()
	c := New(t, cmd)
	release := c.BlockAt("test.a", 1)
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	c.Started()
	if err := c.WaitHits(within(t), "test.a", 2); err != nil {
		t.Fatal(err)
	}
	if c.Hits("test.a") != 2 || c.Hits("test.b") != 0 {
		t.Errorf("the process passed a blocked point: %d, %d", c.Hits("test.a"), c.Hits("test.b"))
	}
	release()
	if err := cmd.Wait(); err != nil || !strings.HasSuffix(out.String(), "b <nil>\n") {
		t.Errorf("child: %v, said %q", err, out)
	}
}

func TestBlockedPointEndsWithItsContext(t *testing.T) {
	cmd, out := child("timeout")
	c := New(t, cmd)
	c.BlockAt("test.a", 0)
	if err := cmd.Run(); err != nil || !strings.Contains(out.String(), "a context deadline exceeded\n") {
		t.Fatalf("child: %v, said %q", err, out)
	}
}

func TestProcessGoesOnWhenTheControllerDies(t *testing.T) {
	cmd, out := child()
	c := New(t, cmd)
	c.BlockAt("test.a", 0)
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	c.Started()
	if err := c.WaitHits(within(t), "test.a", 1); err != nil {
		t.Fatal(err)
	}
	c.Close()
	if err := cmd.Wait(); err != nil || !strings.HasSuffix(out.String(), "b <nil>\n") {
		t.Fatalf("child: %v, said %q", err, out)
	}
}

func TestTakenNamePanics(t *testing.T) {
	for _, name := range []string{"", "test.a"} {
		func() {
			defer func() {
				if recover() == nil {
					t.Errorf("Register(%q) did not panic", name)
				}
			}()
			fault.Register(name)
		}()
	}
}

func BenchmarkDisarmedPoint(b *testing.B) {
	for b.Loop() {
		if err := pointA.Hit(b.Context()); err != nil {
			b.Fatal(err)
		}
	}
}
