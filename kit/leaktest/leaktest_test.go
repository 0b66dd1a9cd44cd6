// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package leaktest

import (
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"
)

// The leaking binary is this test binary, started with a variable that only these tests set.
const leakEnv = "LEAKTEST_LEAK"

func TestMain(m *testing.M) {
	if leak := os.Getenv(leakEnv); leak == "fd" || leak == "goroutine" {
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
	case "goroutine":
		go func() { select {} }()
	case "slow":
		go time.Sleep(time.Second) // ends within the patience
	}
}

func TestLeaksFailTheBinaryAndAreNamed(t *testing.T) {
	for leak, want := range map[string]string{"fd": "/dev/null", "goroutine": "TestLeak", "none": "", "slow": ""} {
		cmd := exec.Command("/proc/self/exe", "-test.run=^TestLeak$")
		cmd.Env = append(os.Environ(), leakEnv+"="+leak, "GORACE=atexit_sleep_ms=0")
		out, err := cmd.CombinedOutput()
		if (err != nil) != (want != "") || !strings.Contains(string(out), want) {
			t.Errorf("leak of %s: %v, want a failure that says %q:\n%s", leak, err, want, out)
		}
	}
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
