// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package kernel

import (
	"context"
	"fmt"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"github.com/sluice-net/sluice/services/datapath/internal/kernel/conntrack"
	"github.com/sluice-net/sluice/services/datapath/internal/kernel/pin"
	"github.com/sluice-net/sluice/services/datapath/internal/observation/kerneltest"
	"golang.org/x/sys/unix"
)

// confinedEnv makes the test binary only open a kernel below the directory in its value.
const confinedEnv = "SLUICE_TEST_CONFINED"

// confinedMain runs in the child process with few capabilities.
func confinedMain() int {
	if err := pin.Probe(context.Background()).Err(); err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 2
	}
	k, err := Open(context.Background(), testOptions(os.Getenv(confinedEnv)))
	if err != nil {
		fmt.Fprintf(os.Stderr, "%+v\n", err)
		return 3
	}
	defer k.Close()
	e := testEndpoint(1, 10)
	s, err := k.Endpoints.Publish(context.Background(), e)
	if err == nil {
		_, err = k.explainer().Explain(conntrack.Tuple{
			Initiator: netip.AddrPortFrom(e.IPv4, 1), Responder: netip.AddrPortFrom(world4, 2), Protocol: 6,
		})
	}
	if err == nil {
		err = k.Endpoints.Cut(s)
	}
	if err == nil {
		err = k.Endpoints.Unpublish(s)
	}
	if err == nil {
		err = k.Endpoints.Barrier(context.Background())
	}
	if err != nil {
		fmt.Fprintf(os.Stderr, "%+v\n", err)
		return 4
	}
	return 0
}

func runConfined(t *testing.T, caps ...uintptr) (string, error) {
	t.Helper()
	dir := kerneltest.NewBPFFS(t)
	if err := os.Mkdir(dir, 0o700); err != nil {
		t.Fatal(err)
	}
	const nobody = 65534
	if err := os.Chown(dir, nobody, nobody); err != nil {
		t.Fatal(err)
	}
	for d := filepath.Dir(filepath.Dir(dir)); d != os.TempDir() && d != "/"; d = filepath.Dir(d) {
		if err := os.Chmod(d, 0o755); err != nil {
			t.Fatal(err)
		}
	}
	exe, err := os.ReadFile("/proc/self/exe")
	if err != nil {
		t.Fatal(err)
	}
	bin := filepath.Join(t.TempDir(), "confined.test")
	if err := os.WriteFile(bin, exe, 0o755); err != nil {
		t.Fatal(err)
	}
	for d := filepath.Dir(bin); d != os.TempDir() && d != "/"; d = filepath.Dir(d) {
		if err := os.Chmod(d, 0o755); err != nil {
			t.Fatal(err)
		}
	}
	cmd := exec.Command(bin)
	cmd.Env = append(os.Environ(), confinedEnv+"="+dir)
	cmd.SysProcAttr = &unix.SysProcAttr{
		Credential:  &syscall.Credential{Uid: nobody, Gid: nobody},
		AmbientCaps: caps,
		Pdeathsig:   unix.SIGKILL,
	}
	out, err := cmd.CombinedOutput()
	return string(out), err
}

func TestKernelThreeCapabilitiesAreEnough(t *testing.T) {
	if out, err := runConfined(t, unix.CAP_BPF, unix.CAP_PERFMON, unix.CAP_NET_ADMIN); err != nil {
		t.Errorf("with CAP_BPF, CAP_PERFMON and CAP_NET_ADMIN: %v\n%s", err, out)
	}
}

func TestKernelAMissingCapabilityIsNamed(t *testing.T) {
	out, err := runConfined(t, unix.CAP_BPF, unix.CAP_NET_ADMIN)
	if err == nil || !strings.Contains(out, "CAP_PERFMON") || strings.Contains(out, "capability CAP_BPF") {
		t.Errorf("without CAP_PERFMON: %v\n%s", err, out)
	}
}
