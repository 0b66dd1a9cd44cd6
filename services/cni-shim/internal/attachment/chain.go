// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package attachment

import (
	"encoding/json"
	"io"
	"os"
	"path/filepath"
	"slices"

	"github.com/sluice-net/sluice/services/cni-shim/internal/cni"
)

// confDir is the default directory of network configurations. Runtimes can use another one.
const confDir = "/etc/cni/net.d"

// Limits for reading that directory.
const (
	mostLists   = 64
	mostOfAList = 1 << 20 // bytes
)

// shapers are the plugins that limit the bandwidth of a container with a qdisc at the host end.
var shapers = []string{"bandwidth"}

// notShaped refuses a network whose configuration list has a plugin that shapes a container's traffic with a qdisc at
// the host end. The datapath delivers packets from other pods without passing that qdisc, so they would not be limited.
// A plugin does not receive the list of chained plugins, so notShaped searches for it by the name of the network. It
// ignores unreadable files, because CHECK and the datapath's audit detect the qdisc itself.
func (p *Plugin) notShaped() error {
	files, _ := filepath.Glob(filepath.Join(p.confDir, "*.conflist"))
	for _, file := range files[:min(len(files), mostLists)] {
		if shaper := shaperIn(file, p.in.Config.Name); shaper != "" {
			return cni.NewError(cni.ErrInvalidConfig, "plugins: "+shaper+" is chained behind sluice-cni in "+file+
				": its qdisc does not limit traffic from other pods; remove it from the list (docs/cni.md, Chaining)", "")
		}
	}
	return nil
}

// shaperIn returns the shaper that the network's list chains behind sluice-cni; "" without a shaper, or if the file is
// of another network.
func shaperIn(file, network string) string {
	f, err := os.Open(file)
	if err != nil {
		return ""
	}
	defer f.Close()
	text, err := io.ReadAll(io.LimitReader(f, mostOfAList))
	if err != nil {
		return ""
	}
	var list struct {
		Name    string
		Plugins []struct{ Type string }
	}
	if json.Unmarshal(text, &list) != nil || list.Name != network {
		return ""
	}
	ours, shaper := false, ""
	for _, plugin := range list.Plugins {
		ours = ours || plugin.Type == "sluice-cni"
		if slices.Contains(shapers, plugin.Type) {
			shaper = plugin.Type
		}
	}
	if !ours {
		return ""
	}
	return shaper
}
