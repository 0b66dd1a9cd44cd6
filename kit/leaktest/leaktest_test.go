// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package leaktest

import (
	"errors"
	"io"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"runtime/debug"
	"slices"
	"strings"
	"testing"
	"time"
)

// The leaking binary is this test binary, started with a variable that only these tests set.
const leakEnv = "LEAKTEST_LEAK"

func TestMain(m *testing.M) {
	if leak := os.Getenv(leakEnv); leak == "fd" || leak == "pipe" || leak == "goroutine" {
		patience = time.Second // leaked on purpose
	}
	Main(m)
}

func TestLeak(t *testing.T) {
	switch os.Getenv(leakEnv) {
	case "fd":
		if _, err := os.Open("/dev/null"); err != nil {
			t.Fatal(err)
		}
	case "pipe":
		if _, _, err := os.Pipe(); err != nil {
			t.Fatal(err)
		}
	case "goroutine":
		go func() { select {} }()
	case "slow":
		go time.Sleep(time.Second) // ends within the patience
	}
}

func TestLeaksFailTheBinaryAndAreNamed(t *testing.T) {
	for leak, want := range map[string]string{
		"fd": "/dev/null", "pipe": "pipe:", "goroutine": "TestLeak", "none": "", "slow": "",
	} {
		cmd := exec.Command("/proc/self/exe", "-test.run=^TestLeak$")
		cmd.Env = append(os.Environ(), leakEnv+"="+leak, "GORACE=atexit_sleep_ms=0")
		out, err := cmd.CombinedOutput()
		if (err != nil) != (want != "") || !strings.Contains(string(out), want) {
			t.Errorf("leak of %s: %v, want a failure that says %q:\n%s", leak, err, want, out)
		}
	}
}

// TestPipesOfTheRuntimeAreNoLeaks: io.Copy between two sockets leaves a pipe in the process, which Go's garbage
// collection closes.
func TestPipesOfTheRuntimeAreNoLeaks(t *testing.T) {
	defer debug.SetGCPercent(debug.SetGCPercent(-1))
	check, err := begin([]Resource{Descriptors()})
	if err != nil {
		t.Fatal(err)
	}
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	echoed := make(chan error, 1)
	go func() {
		c, err := l.Accept()
		if err == nil {
			_, err = io.Copy(c, c)
			err = errors.Join(err, c.Close())
		}
		echoed <- err
	}()
	c, err := net.Dial("tcp", l.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	if _, err := io.WriteString(c, "x"); err != nil {
		t.Fatal(err)
	}
	if _, err := io.ReadFull(c, make([]byte, 1)); err != nil {
		t.Fatal(err)
	}
	if err := errors.Join(c.Close(), <-echoed, l.Close()); err != nil {
		t.Fatal(err)
	}
	if !slices.ContainsFunc(pipes(t), splices) {
		t.Error("io.Copy left no pipe: this test proves nothing")
	}
	if err := check(); err != nil {
		t.Error(err)
	}
}

// pipes returns the descriptors of this process that are ends of pipes.
func pipes(t *testing.T) (found []string) {
	t.Helper()
	entries, err := os.ReadDir("/proc/self/fd")
	if err != nil {
		t.Fatal(err)
	}
	for _, e := range entries {
		if target, err := os.Readlink("/proc/self/fd/" + e.Name()); err == nil && strings.HasPrefix(target, "pipe:") {
			found = append(found, e.Name())
		}
	}
	return found
}

func TestResourceThatGoesLaterIsWaitedFor(t *testing.T) {
	path := filepath.Join(t.TempDir(), "x")
	check, err := begin([]Resource{Files("files", path)})
	if err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(path, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	removed := make(chan error)
	timer := time.AfterFunc(20*time.Millisecond, func() { removed <- os.Remove(path) })
	defer timer.Stop()
	errs := make(chan error, 1)
	go func() { errs <- check() }()
	if err := errors.Join(<-removed, <-errs); err != nil {
		t.Fatal(err)
	}
}

func TestBuiltInListsSeeWhatIsThere(t *testing.T) {
	if names, err := Links("lo").List(); err != nil || len(names) == 0 {
		t.Errorf("Links(lo) = %q, %v", names, err)
	}
	if names, err := Mounts("/proc").List(); err != nil || len(names) == 0 {
		t.Errorf("Mounts(/proc) = %q, %v", names, err)
	}
}
