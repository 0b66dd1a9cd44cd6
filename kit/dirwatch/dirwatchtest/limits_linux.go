// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

// Package dirwatchtest runs tests with lowered inotify limits.
package dirwatchtest

import (
	"os"
	"os/exec"
	"strconv"
	"syscall"
	"testing"
)

// variable holds the name of the test that runs in a user namespace.
const variable = "SLUICE_DIRWATCH_TEST"

// Limited runs the calling test again in a child process with its own user namespace, whose inotify
// limits are independent of the machine's. In the child, inside is true, and limit sets the maximum
// number of instances and watches.
func Limited(t *testing.T) (limit func(instances, watches int), inside bool) {
	t.Helper()
	if os.Getenv(variable) == t.Name() {
		return func(instances, watches int) {
			t.Helper()
			for name, n := range map[string]int{"instances": instances, "watches": watches} {
				if err := os.WriteFile("/proc/sys/user/max_inotify_"+name, []byte(strconv.Itoa(n)), 0); err != nil {
					t.Fatal(err)
				}
			}
		}, true
	}
	command := exec.Command("/proc/self/exe", "-test.run=^"+t.Name()+"$", "-test.count=1", "-test.v")
	command.Env = append(os.Environ(), variable+"="+t.Name())
	command.SysProcAttr = &syscall.SysProcAttr{
		Cloneflags:  syscall.CLONE_NEWUSER,
		UidMappings: []syscall.SysProcIDMap{{HostID: os.Getuid(), Size: 1}},
		GidMappings: []syscall.SysProcIDMap{{HostID: os.Getgid(), Size: 1}},
	}
	if out, err := command.CombinedOutput(); err != nil {
		t.Errorf("in a user namespace: %v\n%s", err, out)
	}
	return nil, false
}
