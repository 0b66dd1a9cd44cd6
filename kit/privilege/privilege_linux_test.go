// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package privilege

import (
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"runtime"
	"strings"
	"sync"
	"syscall"
	"testing"

	"golang.org/x/sys/unix"
)

// Irreversible changes are tested in a child process: this test binary, built without cgo like the
// shipped binaries (-race needs cgo). The first argument selects the job.
const childArg = "privilege-child:"

var childPath string

func TestMain(m *testing.M) {
	if len(os.Args) > 1 && strings.HasPrefix(os.Args[1], childArg) {
		child(strings.TrimPrefix(os.Args[1], childArg))
		return
	}
	os.Exit(withChild(m))
}

func withChild(m *testing.M) int {
	dir, err := os.MkdirTemp("", "privilege")
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	defer os.RemoveAll(dir)
	if err := os.Chmod(dir, 0o755); err != nil { // one child runs as another user
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	childPath = dir + "/child"
	build := exec.Command("go", "test", "-c", "-o", childPath, ".")
	build.Env = append(os.Environ(), "CGO_ENABLED=0")
	if out, err := build.CombinedOutput(); err != nil {
		fmt.Fprintf(os.Stderr, "build the child: %v\n%s", err, out)
		return 1
	}
	return m.Run()
}

// child starts several threads, drops the privileges that the job names, and prints the resulting
// state.
func child(job string) {
	release := make(chan struct{})
	var locked sync.WaitGroup
	for range 8 {
		locked.Add(1)
		go func() {
			runtime.LockOSThread()
			locked.Done()
			<-release
		}()
	}
	locked.Wait()
	var err error
	switch job {
	case "keep":
		err = KeepCapabilities(four...)
	case "twice":
		if err = KeepCapabilities(unix.CAP_NET_ADMIN, unix.CAP_SETPCAP); err == nil {
			err = KeepCapabilities(unix.CAP_NET_ADMIN, unix.CAP_BPF)
		}
	case "none":
		if err = KeepCapabilities(); err == nil {
			err = NoNewPrivs()
		}
	case "exec":
		if err = KeepCapabilities(unix.CAP_NET_ADMIN); err == nil {
			var out []byte
			if out, err = exec.Command("/proc/self/exe", childArg+"show").Output(); err == nil {
				os.Stdout.Write(out)
				return
			}
		}
	case "become", "become-in-container":
		if job == "become-in-container" {
			err = KeepCapabilities(append([]Cap{unix.CAP_SETUID, unix.CAP_SETGID}, four...)...)
		}
		if err == nil {
			err = Become(65706, 65700, four...)
		}
	case "become-without-setuid":
		if err = KeepCapabilities(four...); err == nil {
			err = Become(65706, 65700, four...)
		}
	case "unprivileged":
		if err = KeepCapabilities(); err == nil || !strings.Contains(err.Error(), "no_new_privs first") {
			err = errors.New("KeepCapabilities before NoNewPrivs: " + fmt.Sprint(err))
			break
		}
		if err = NoNewPrivs(); err == nil {
			err = KeepCapabilities()
		}
	case "show":
	}
	close(release)
	if err != nil {
		fmt.Print(err)
		os.Exit(1)
	}
	// A new thread inherits from a thread that was changed.
	var st State
	done := make(chan struct{})
	go func() {
		defer close(done)
		runtime.LockOSThread()
		st, err = Current()
	}()
	<-done
	if err != nil {
		fmt.Print(err)
		os.Exit(1)
	}
	if err := json.NewEncoder(os.Stdout).Encode(st); err != nil {
		os.Exit(1)
	}
}

// four are the capabilities of a privileged process in the tests.
var four = []Cap{unix.CAP_BPF, unix.CAP_PERFMON, unix.CAP_NET_ADMIN, unix.CAP_SYS_ADMIN}

func runChild(t *testing.T, job string) (State, string, error) { return runChildAs(t, 0, job) }

func runChildAs(t *testing.T, uid uint32, job string) (State, string, error) {
	t.Helper()
	if os.Geteuid() != 0 {
		t.Fatal("this test needs root")
	}
	cmd := exec.Command(childPath, childArg+job)
	cmd.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: uid, Gid: uid}}
	out, err := cmd.Output()
	var st State
	if err == nil {
		if jerr := json.Unmarshal(out, &st); jerr != nil {
			t.Fatalf("child said %q", out)
		}
	}
	return st, string(out), err
}

func TestKernelKeepsExactlyTheNamedCapabilitiesInEveryThread(t *testing.T) {
	keep := SetOf(unix.CAP_BPF, unix.CAP_PERFMON, unix.CAP_NET_ADMIN, unix.CAP_SYS_ADMIN)
	st, out, err := runChild(t, "keep")
	if want := (State{Permitted: keep, Effective: keep, Bounding: keep, NoNewPrivs: st.NoNewPrivs}); err != nil || st != want {
		t.Fatalf("child has %+v (%v, %s), want %+v", st, err, out, want)
	}
}

// TestKernelBecomesAUserWithExactlyTheNamedCapabilities: with the right to shrink the bounding set, as root has it, and
// without this right, as in a container with minimal capabilities.
func TestKernelBecomesAUserWithExactlyTheNamedCapabilities(t *testing.T) {
	keep := SetOf(four...)
	for job, bounding := range map[string]Set{"become": keep, "become-in-container": keep | SetOf(unix.CAP_SETUID, unix.CAP_SETGID)} {
		st, out, err := runChild(t, job)
		want := State{
			UIDs: [4]uint32{65706, 65706, 65706, 65706}, GIDs: [4]uint32{65700, 65700, 65700, 65700},
			Permitted: keep, Effective: keep, Bounding: bounding, NoNewPrivs: true,
		}
		if err != nil || st != want {
			t.Errorf("%s: child has %+v (%v, %s), want %+v", job, st, err, out, want)
		}
	}
	_, out, err := runChild(t, "become-without-setuid")
	if err == nil || !strings.Contains(out, "does not have CAP_SETGID,CAP_SETUID") {
		t.Errorf("without the right to change the user: child said %q (%v)", out, err)
	}
}

func TestKernelKeepingNoCapabilityLeavesNothing(t *testing.T) {
	st, out, err := runChild(t, "none")
	if want := (State{NoNewPrivs: true}); err != nil || st != want {
		t.Fatalf("child has %+v (%v, %s), want %+v", st, err, out, want)
	}
}

func TestKernelUserWithoutCapabilitiesDropsThemUnderNoNewPrivs(t *testing.T) {
	st, out, err := runChildAs(t, 65534, "unprivileged")
	if err != nil || st.Permitted|st.Effective|st.Inheritable|st.Ambient != 0 || !st.NoNewPrivs {
		t.Fatalf("child has %+v (%v, %s), want no capability and no_new_privs", st, err, out)
	}
}

func TestKernelExecutedProgramsGetNoMoreThanWasKept(t *testing.T) {
	st, out, err := runChild(t, "exec")
	keep := SetOf(unix.CAP_NET_ADMIN)
	if err != nil || st.Bounding != keep || st.Permitted&^keep != 0 || st.Effective&^keep != 0 {
		t.Fatalf("executed by the child, a program has %+v (%v, %s), want no more than %s", st, err, out, keep)
	}
}

func TestKernelCapabilityThatIsGoneIsNamed(t *testing.T) {
	_, out, err := runChild(t, "twice")
	if err == nil || !strings.Contains(out, "does not have CAP_BPF") {
		t.Fatalf("child said %q (%v), want that it does not have CAP_BPF", out, err)
	}
}

func TestCapabilityNamesMatchTheKernelsNumbers(t *testing.T) {
	for c, name := range map[Cap]string{
		unix.CAP_CHOWN: "CAP_CHOWN", unix.CAP_NET_ADMIN: "CAP_NET_ADMIN", unix.CAP_SYS_ADMIN: "CAP_SYS_ADMIN",
		unix.CAP_SETFCAP: "CAP_SETFCAP", unix.CAP_PERFMON: "CAP_PERFMON", unix.CAP_BPF: "CAP_BPF",
		unix.CAP_CHECKPOINT_RESTORE: "CAP_CHECKPOINT_RESTORE", 60: "CAP_60",
	} {
		if c.String() != name {
			t.Errorf("capability %d is called %s, want %s", int(c), c, name)
		}
	}
	if got := SetOf().String(); got != "none" {
		t.Errorf("empty set is %q", got)
	}
}

func TestStatusWithMissingLinesIsRefused(t *testing.T) {
	whole := "Uid:\t1\t2\t3\t4\nGid:\t5\t6\t7\t8\nCapInh:\t0000000000000000\nCapPrm:\t1\nCapEff:\t1\nCapBnd:\t3\nCapAmb:\t0\nNoNewPrivs:\t1\n"
	st, err := parseStatus(whole)
	if want := (State{UIDs: [4]uint32{1, 2, 3, 4}, GIDs: [4]uint32{5, 6, 7, 8}, Permitted: 1, Effective: 1, Bounding: 3, NoNewPrivs: true}); err != nil || st != want {
		t.Fatalf("parseStatus = %+v, %v; want %+v", st, err, want)
	}
	for _, bad := range []string{"", strings.Replace(whole, "CapBnd", "X", 1), strings.Replace(whole, "Uid", "X", 1), strings.Replace(whole, "\t8", "", 1), strings.Replace(whole, "\t3", "\tzz", 1)} {
		if st, err := parseStatus(bad); err == nil {
			t.Errorf("parseStatus(%q) = %+v, want an error", bad, st)
		}
	}
}
