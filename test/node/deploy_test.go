// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package node

import (
	"errors"
	"os"
	"path/filepath"
	"testing"

	"github.com/sluice-net/sluice/test/internal/cni"
	"github.com/sluice-net/sluice/test/internal/pod"
)

// TestDeployedConfigurationIsAccepted proves that the plugin accepts the shipped configuration: ADD fails only
// because of the network namespace.
func TestDeployedConfigurationIsAccepted(t *testing.T) {
	list, err := os.ReadFile(filepath.Join("..", "..", "deploy", "cni", "10-sluice.conflist"))
	if err != nil {
		t.Fatal(err)
	}
	// The default log belongs to the machine.
	config, err := cni.PluginConfig(list, "1.0.0", map[string]any{"logFile": ""})
	if err != nil {
		t.Fatal(err)
	}
	p := pod.Pod{Name: "deployed", Netns: filepath.Join(t.TempDir(), "missing")}
	_, err = cni.Run(t.Context(), cni.Call{
		Plugin: filepath.Join(binDir(), "sluice-cni"), Command: "ADD",
		ContainerID: p.Name, Netns: p.Netns, IfName: "eth0", Config: config,
	})
	const invalidEnvironment = 4
	var failure *cni.Error
	if !errors.As(err, &failure) || failure.Code != invalidEnvironment {
		t.Errorf("ADD into a namespace that does not exist: got %v, want code %d about it", err, invalidEnvironment)
	}
}
