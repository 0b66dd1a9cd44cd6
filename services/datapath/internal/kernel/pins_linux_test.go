// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package kernel

import (
	"os"
	"slices"
	"strings"
	"testing"

	"github.com/sluice-net/sluice/services/datapath/internal/observation/kerneltest"
)

// pinPath returns the path of a map's pin.
func (k *Kernel) pinPath(name string) string { return k.Pins.Pin(name) }

func TestKernelPinThatIsNoMapIsNamed(t *testing.T) {
	dir := kerneltest.NewBPFFS(t)
	k, err := Open(t.Context(), testOptions(dir))
	if err != nil {
		t.Fatal(err)
	}
	path := k.pinPath("sl_if")
	for what, put := range map[string]func() error{
		"a directory": func() error { return os.Mkdir(path, 0o700) },
		"a program": func() error {
			p, err := k.program("sluice_to_pod").Clone()
			if err != nil {
				return err
			}
			defer p.Close()
			return p.Pin(path)
		},
	} {
		if err := os.Remove(path); err != nil {
			t.Fatal(err)
		}
		if err := put(); err != nil {
			t.Fatal(err)
		}
		differences, err := k.Pins.Audit(false)
		if err != nil || !slices.ContainsFunc(differences, func(d string) bool { return strings.Contains(d, path) && strings.Contains(d, "not a map") }) {
			t.Errorf("%s: the audit returns %q, %v, want a difference that names %s", what, differences, err, path)
		}
		_, err = Open(t.Context(), testOptions(dir))
		if err == nil {
			t.Fatalf("%s: opened", what)
		}
		for _, want := range []string{"adopt map sl_if", path, "not a map", "remove it by hand"} {
			if !strings.Contains(err.Error(), want) {
				t.Errorf("%s: Open returns %q, want %q in it", what, err, want)
			}
		}
	}
	if err := k.Close(); err != nil {
		t.Error(err)
	}
}
