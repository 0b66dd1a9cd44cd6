// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package attachment

import (
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/sluice-net/sluice/services/cni-shim/internal/cni"
	"github.com/sluice-net/sluice/services/cni-shim/internal/invocation"
)

// TestShaperBehindThePluginIsRefused shows that ADD refuses a network whose list chains
// the plugin bandwidth, and no other one.
func TestShaperBehindThePluginIsRefused(t *testing.T) {
	const ours = `{"type": "sluice-cni"}`
	for name, c := range map[string]struct {
		list    string
		refused bool
	}{
		"behind": {`{"name": "sluice", "plugins": [` + ours + `, {"type": "bandwidth"}]}`, true},
		"before": {`{"name": "sluice", "plugins": [{"type": "bandwidth"}, ` + ours + `]}`, true},
		"third": {`{"name": "sluice", "plugins": [` + ours + `, {"type": "portmap"}, ` +
			`{"type": "bandwidth", "capabilities": {"bandwidth": true}}]}`, true},
		"of another name":   {`{"name": "other", "plugins": [` + ours + `, {"type": "bandwidth"}]}`, false},
		"of another plugin": {`{"name": "sluice", "plugins": [{"type": "bridge"}, {"type": "bandwidth"}]}`, false},
		"portmap":           {`{"name": "sluice", "plugins": [` + ours + `, {"type": "portmap"}]}`, false},
		"no list":           {`{"name": `, false},
		"empty":             {``, false},
	} {
		t.Run(name, func(t *testing.T) {
			p := &Plugin{in: invocation.Invocation{Config: invocation.Config{Name: "sluice"}}, confDir: t.TempDir()}
			if err := p.notShaped(); err != nil {
				t.Fatalf("without a list: %v", err)
			}
			if err := os.WriteFile(filepath.Join(p.confDir, "10-net.conflist"), []byte(c.list), 0o600); err != nil {
				t.Fatal(err)
			}
			err := p.notShaped()
			if (err != nil) != c.refused {
				t.Fatalf("%v, want it refused: %t", err, c.refused)
			}
			if refused, ok := errors.AsType[*cni.Error](err); c.refused &&
				(!ok || refused.Code != cni.ErrInvalidConfig || !strings.Contains(err.Error(), "docs/cni.md")) {
				t.Errorf("%v, want code %d and the page", err, cni.ErrInvalidConfig)
			}
		})
	}
	p := &Plugin{in: invocation.Invocation{Config: invocation.Config{Name: "sluice"}}, confDir: "/nonexistent"}
	if err := p.notShaped(); err != nil {
		t.Errorf("without the directory: %v", err)
	}
}
