// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package process

import (
	"errors"
	"fmt"
	"strings"
	"testing"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/sluice-net/sluice/kit/log"
	"github.com/sluice-net/sluice/kit/sandbox"
)

// TestMissingLayersOfTheSandboxAreTold: an unsupported layer is not an error, and the status shows
// it, so that an operator need not read the log.
func TestMissingLayersOfTheSandboxAreTold(t *testing.T) {
	p := &Process{Log: log.Discard(), sandbox: prometheus.NewGaugeVec(prometheus.GaugeOpts{Name: "x", Help: "x"},
		[]string{"layer"})}
	if err := p.sandboxed("seccomp", nil); err != nil || len(p.MissingLayers()) != 0 {
		t.Errorf("a layer that is enforced: %v, %q", err, p.MissingLayers())
	}
	if err := p.sandboxed("landlock", fmt.Errorf("restrict files: %w", sandbox.ErrUnsupported)); err != nil {
		t.Errorf("a layer that the kernel does not have: %v", err)
	}
	if told := p.MissingLayers(); len(told) != 1 || !strings.Contains(told[0], "landlock") ||
		!strings.Contains(told[0], sandbox.ErrUnsupported.Error()) {
		t.Errorf("reported %q, want landlock and the reason", told)
	}
	if err := p.sandboxed("seccomp", errors.New("refused")); err == nil || len(p.MissingLayers()) != 1 {
		t.Errorf("a layer that failed: %v, %q, want the error", err, p.MissingLayers())
	}
}
