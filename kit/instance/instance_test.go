// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package instance

import (
	"errors"
	"strings"
	"testing"
)

func TestInstanceNameIsPartOfEveryDirectory(t *testing.T) {
	def, err := New("")
	if want := (Paths{RunDir: "/run/sluice", ConfigDir: "/etc/sluice", StateDir: "/var/lib/sluice", BPFDir: "/run/sluice/bpf"}); err != nil || def != want {
		t.Errorf("New(\"\") = %+v, %v; want %+v", def, err, want)
	}
	p, err := New("blue-2")
	if err != nil {
		t.Fatal(err)
	}
	p = p.Under("/tmp/x")
	for got, want := range map[string]string{
		p.Socket("svc"):                        "/tmp/x/run/sluice-blue-2/svc/svc.sock",
		p.MetricsSocket("svc"):                 "/tmp/x/run/sluice-blue-2/svc/metrics.sock",
		p.ProxySocket():                        "/tmp/x/run/sluice-blue-2/datapath/proxy.sock",
		p.ServiceRunDir("svc"):                 "/tmp/x/run/sluice-blue-2/svc",
		p.ConfigFile("svc"):                    "/tmp/x/etc/sluice-blue-2/svc.yaml",
		p.ServiceStateDir("svc"):               "/tmp/x/var/lib/sluice-blue-2/svc",
		p.BPFDir:                               "/tmp/x/run/sluice-blue-2/bpf",
		ListenersSocketBeside(p.Socket("svc")): "/tmp/x/run/sluice-blue-2/datapath/listeners.sock",
	} {
		if got != want {
			t.Errorf("got %s, want %s", got, want)
		}
	}
}

func TestNamesThatCouldLeaveTheDirectoryAreRefused(t *testing.T) {
	for _, name := range []string{"..", "a/b", "-a", "A", "a_b", "a b", strings.Repeat("a", 33), "é", "a\n"} {
		if p, err := New(name); !errors.Is(err, ErrName) {
			t.Errorf("New(%q) = %+v, %v; want ErrName", name, p, err)
		}
		if err := CheckService(name); !errors.Is(err, ErrName) {
			t.Errorf("CheckService(%q) = %v, want ErrName", name, err)
		}
	}
	for _, name := range []string{"a", "0", "a-1", strings.Repeat("a", 32)} {
		if _, err := New(name); err != nil {
			t.Errorf("New(%q): %v", name, err)
		}
	}
	if err := CheckService("cni-shim"); err != nil {
		t.Error(err)
	}
	if err := CheckService(""); err == nil {
		t.Error("the empty service name was accepted")
	}
}
