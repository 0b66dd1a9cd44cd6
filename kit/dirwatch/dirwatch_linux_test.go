// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package dirwatch_test

import (
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/sluice-net/sluice/kit/dirwatch"
	"github.com/sluice-net/sluice/kit/dirwatch/dirwatchtest"
)

// TestKernelWatchWithoutRoomIsReportedAndMadeLater exhausts the inotify limits, then raises them.
func TestKernelWatchWithoutRoomIsReportedAndMadeLater(t *testing.T) {
	limit, inside := dirwatchtest.Limited(t)
	if !inside {
		return
	}
	for _, x := range []struct {
		instances, watches int
		errno              error
		names              string
	}{
		{0, 1000, unix.EMFILE, "fs.inotify.max_user_instances"},
		{1000, 0, unix.ENOSPC, "fs.inotify.max_user_watches"},
		{1000, 1, unix.ENOSPC, "fs.inotify.max_user_watches"}, // enough for the parent only
	} {
		dir := filepath.Join(t.TempDir(), "policies")
		w := dirwatch.Watch()
		if err := os.Mkdir(dir, 0o700); err != nil {
			t.Fatal(err)
		}
		limit(x.instances, x.watches)
		if _, err := w.Renew(dir); !errors.Is(err, x.errno) || !strings.Contains(err.Error(), x.names) {
			t.Errorf("%+v: %v", x, err)
		}
		limit(1000, 1000)
		if other, err := w.Renew(dir); !other || err != nil {
			t.Errorf("with capacity again: another directory %t: %v", other, err)
		}
		file := filepath.Join(dir, "a.yaml")
		if err := os.WriteFile(file, nil, 0o600); err != nil {
			t.Fatal(err)
		}
		if e := <-w.Events; e.Name != "a.yaml" {
			t.Errorf("the first event is %+v", e)
		}
		w.Close()
	}
}

// TestMissingDirectoryIsWatchedWhenItAppears: a missing directory is not reported as an exhausted
// limit.
func TestMissingDirectoryIsWatchedWhenItAppears(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "policies")
	w := dirwatch.Watch()
	defer w.Close()
	if other, err := w.Renew(dir); other || err != nil {
		t.Errorf("without the directory: %t, %v", other, err)
	}
	if err := os.Mkdir(dir, 0o700); err != nil {
		t.Fatal(err)
	}
	if e := <-w.Events; e.Name != "" {
		t.Errorf("the directory appeared: %+v", e)
	}
	if other, err := w.Renew(dir); !other || err != nil {
		t.Errorf("with the directory: %t, %v", other, err)
	}
}
