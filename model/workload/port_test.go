// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package workload

import (
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"

	"github.com/sluice-net/sluice/model/label"
)

func hidden(value string) label.Set {
	return label.NewSet(label.Label{Source: "generated", Key: "named-ports", Value: value})
}

// TestNamedPortsSurviveTheLabel also checks the literal value, because label sets in etcd contain it.
func TestNamedPortsSurviveTheLabel(t *testing.T) {
	ports := []NamedPort{
		{"web", 80, TCP}, {"dns", 53, UDP}, {"dns", 53, TCP}, {"web", 8080, TCP}, {"web", 80, TCP}, {"a", 9, SCTP},
	}
	l, ok, err := NamedPortsLabel(ports)
	if err != nil || !ok || l.String() != "generated:named-ports=a.SCTP.9_dns.TCP.53_dns.UDP.53_web.TCP.80_web.TCP.8080" {
		t.Fatalf("label %s, %t, %v", l, ok, err)
	}
	got, err := NamedPortsOf(label.NewSet(l, label.Kubernetes("app", "web")))
	want := []NamedPort{{"a", 9, SCTP}, {"dns", 53, TCP}, {"dns", 53, UDP}, {"web", 80, TCP}, {"web", 8080, TCP}}
	if err != nil || !slices.Equal(got, want) {
		t.Errorf("%v, %v from %s, want %v", got, err, l, want)
	}
	// In records of endpoints the port comes before the protocol.
	stored := []NamedPort{{"dns", 53, UDP}, {"dns", 5353, TCP}}
	if !slices.IsSortedFunc(stored, NamedPort.Compare) {
		t.Errorf("%v is not in the stored order", stored)
	}
}

func TestWorkloadWithoutNamedPortsHasNoLabel(t *testing.T) {
	if l, ok, err := NamedPortsLabel(nil); ok || err != nil {
		t.Errorf("label %s, %t, %v", l, ok, err)
	}
	other := label.NewSet(label.Label{Source: "k8s", Key: "named-ports", Value: "web.TCP.80"})
	if ports, err := NamedPortsOf(other); len(ports) != 0 || err != nil {
		t.Errorf("%v, %v from %s", ports, err, other)
	}
}

func TestBadNamedPortsAreRefused(t *testing.T) {
	for field, bad := range map[string]NamedPort{
		"named_ports[1].name: \"\"":   {"", 80, TCP},
		"named_ports[1].name: \"H\"":  {"H", 80, TCP},
		"named_ports[1].name: \"nam":  {"name-of-sixteen-", 80, TCP},
		"named_ports[1].name: \"-a\"": {"-a", 80, TCP},
		"named_ports[1].name: \"a-\"": {"a-", 80, TCP},
		"named_ports[1].port: 0":      {"http", 0, TCP},
		"named_ports[1].protocol: \"": {"http", 80, 1},
	} {
		_, _, err := NamedPortsLabel([]NamedPort{{"ok", 1, TCP}, bad})
		if !errors.Is(err, ErrNamedPort) || !strings.Contains(err.Error(), field) {
			t.Errorf("%v: error %v, want one about %s", bad, err, field)
		}
	}
	for _, value := range []string{
		"", "x", "x.TCP", "x.TCP.0", "x.TCP.70000", "x.TCP.+1", ".TCP.80", "x.FOO.80", "x.tcp.80",
		"X.TCP.80", "x.TCP.80_", "x.TCP.80.1",
		strings.Repeat("x.TCP.80_", label.MaxValue/9) + "x.TCP.80",
	} {
		if ports, err := NamedPortsOf(hidden(value)); !errors.Is(err, ErrNamedPort) {
			t.Errorf("%.40q is read as %v, %v", value, ports, err)
		}
	}
}

// FuzzNamedPorts searches for values that change when they are read and written again.
func FuzzNamedPorts(f *testing.F) {
	for _, s := range []string{
		"http.TCP.80", "http.TCP.80_http.TCP.81_dns.udp.53", "a.SCTP.65535", "a.TCP.0", "_", "a..1",
		"a.TCP.65536", "a.TCP.+1", "a.TCP.01",
	} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, value string) {
		ports, err := NamedPortsOf(hidden(value))
		if err != nil {
			return
		}
		l, ok, err := NamedPortsLabel(ports)
		if err != nil || !ok {
			t.Fatalf("%q gives %s, %v", value, l, err)
		}
		if again, err := NamedPortsOf(label.NewSet(l)); err != nil || !slices.Equal(again, ports) {
			t.Fatalf("%q is written %q, and that is %v, %v", value, l.Value, again, err)
		}
	})
}

func TestNamedPortsThatFitAreThoseOfTheLabel(t *testing.T) {
	for _, v := range []struct {
		name       string
		ports      int
		all        bool
		mostLength int
	}{
		{"p", 100, true, 4096},
		{"p", 300, false, 4096}, // too many
		{"a-long-name", 200, false, 4096},
	} {
		var ports []NamedPort
		for i := range v.ports {
			ports = append(ports, NamedPort{fmt.Sprint(v.name, i), uint16(i + 1), UDP})
		}
		kept, left := FitNamedPorts(append(ports, ports[0]))
		l, ok, err := NamedPortsLabel(kept)
		if !ok || err != nil || len(l.Value) > v.mostLength || len(kept) > MaxNamedPorts || len(kept)+left != v.ports ||
			(left == 0) != v.all || len(kept) < v.ports/2 {
			t.Errorf("%s: %d kept and %d left of %d; %t, %v", v.name, len(kept), left, v.ports, ok, err)
		}
		again, _ := FitNamedPorts(reversed(ports))
		if NamedPortsText(again) != l.Value {
			t.Errorf("%s: the same ports in another order give another result", v.name)
		}
	}
	kept, left := FitNamedPorts([]NamedPort{{"UPPER", 1, TCP}, {"web", 0, TCP}, {"web", 80, 1}, {"web", 80, TCP}})
	if left != 3 || !slices.Equal(kept, []NamedPort{{"web", 80, TCP}}) {
		t.Errorf("of one valid port %v is kept, and %d are left out", kept, left)
	}
	if kept, left := FitNamedPorts(nil); kept != nil || left != 0 {
		t.Errorf("without ports: %v, %d", kept, left)
	}
}

func reversed(ports []NamedPort) []NamedPort {
	ports = slices.Clone(ports)
	slices.Reverse(ports)
	return ports
}
