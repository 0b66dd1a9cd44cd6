// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package host

import (
	"errors"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"slices"
	"testing"
)

func TestRealtimeKernelIsRecognised(t *testing.T) {
	dir := t.TempDir()
	for name, content := range map[string]string{"yes": "1\n", "no": "0\n"} {
		if err := os.WriteFile(filepath.Join(dir, name), []byte(content), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	for name, want := range map[string]bool{"yes": true, "no": false, "missing": false} {
		if got, err := realtime(filepath.Join(dir, name)); err != nil || got != want {
			t.Errorf("%s: %v, %v, want %v", name, got, err, want)
		}
	}
}

// portFirewall has rules about UDP ports.
type portFirewall struct {
	Firewall
	asked []uint16
	err   error
}

func (*portFirewall) MarkRules(uint32) ([]string, error) { return nil, nil }
func (*portFirewall) Closed() ([]string, error)          { return nil, nil }

func (f *portFirewall) PortRules(port uint16) ([]string, error) {
	f.asked = append(f.asked, port)
	return []string{fmt.Sprintf("rule for %d", port)}, f.err
}

// TestBypassedRulesAreReadOnlyWherePacketsBypassThem checks that an error leaves the last result.
func TestBypassedRulesAreReadOnlyWherePacketsBypassThem(t *testing.T) {
	fw := &portFirewall{}
	h := New(Options{Firewall: fw, Log: slog.New(slog.DiscardHandler)})
	if err := h.CheckWarnings(); err != nil || len(fw.asked) > 0 || len(h.Bypassed()) > 0 {
		t.Errorf("without a direct path: %v, asked for %v, bypassed %q", err, fw.asked, h.Bypassed())
	}
	h = New(Options{Firewall: fw, TunnelPort: 4789, Log: slog.New(slog.DiscardHandler)})
	if err := h.CheckWarnings(); err != nil {
		t.Fatal(err)
	}
	fw.err = errors.New("netlink")
	if err := h.CheckWarnings(); !errors.Is(err, fw.err) {
		t.Errorf("CheckWarnings: %v, want %v", err, fw.err)
	}
	if got := h.Bypassed(); !slices.Equal(got, []string{"rule for 4789"}) {
		t.Errorf("bypassed %q", got)
	}
}
