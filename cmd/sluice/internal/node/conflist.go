// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package node

import (
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"

	"github.com/sluice-net/sluice/kit/durable"
	"github.com/sluice-net/sluice/kit/instance"
)

// plugin is both the file name and the type of the CNI plugin.
const plugin = "sluice-cni"

// configuration is the CNI configuration file of a container runtime.
type configuration struct {
	directory string // of the runtime
	name      string // of two files, the runtime uses the one whose name sorts first
	plugins   string // directory of the plugins
	paths     instance.Paths
	// translates means that the datapath translates host ports, because it translates services.
	translates bool
}

func (c configuration) path() string { return filepath.Join(c.directory, c.name) }

type network struct {
	CNIVersion string            `json:"cniVersion"`
	Name       string            `json:"name"`
	Plugins    []json.RawMessage `json:"plugins"`
}

// content returns the desired content of the file. If the datapath does not translate host ports, the file contains the
// reference plugin portmap, if it is installed.
func (c configuration) content() []byte {
	opener := c.opener()
	capabilities := map[string]bool{"labels": true, "ips": true, "mac": true, "io.kubernetes.cri.pod-annotations": true}
	if opener == openerSluice {
		capabilities[portMappings] = true
	}
	own := map[string]any{
		"type": plugin, "runDir": c.paths.RunDir, "mtu": 0, "timeout": "30s",
		"logFile":      "/var/log/" + filepath.Base(c.paths.RunDir) + "/cni.log",
		"capabilities": capabilities,
	}
	n := network{CNIVersion: "1.0.0", Name: filepath.Base(c.paths.RunDir), Plugins: []json.RawMessage{encode(own)}}
	if opener == openerPortmap {
		n.Plugins = append(n.Plugins, encode(map[string]any{
			"type": openerPortmap, "snat": true, "capabilities": map[string]bool{portMappings: true},
		}))
	}
	b, err := json.MarshalIndent(n, "", "  ")
	if err != nil {
		panic(err) // maps and strings can always be encoded
	}
	return append(b, '\n')
}

func encode(v any) json.RawMessage {
	b, err := json.Marshal(v)
	if err != nil {
		panic(err) // maps and strings can always be encoded
	}
	return b
}

// portMappings is the capability of a plugin that opens host ports.
const portMappings = "portMappings"

// Implementations of host ports.
const (
	openerSluice  = "sluice"
	openerPortmap = "portmap" // the reference plugin
	openerNone    = "none"
)

// opener returns the implementation that opens a pod's host ports (hostPort).
func (c configuration) opener() string {
	if c.translates {
		return openerSluice
	}
	if _, err := os.Stat(filepath.Join(c.plugins, openerPortmap)); err != nil {
		return openerNone
	}
	return openerPortmap
}

// errForeign is returned if another program has written the existing file.
var errForeign = errors.New("belongs to another network; it was not changed")

// read returns the content of the file; nil if it does not exist.
func (c configuration) read() ([]byte, error) {
	content, err := durable.ReadFile(c.path(), 1<<20)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	var n network
	var first struct {
		Type   string `json:"type"`
		RunDir string `json:"runDir"`
	}
	if json.Unmarshal(content, &n) != nil || len(n.Plugins) == 0 || json.Unmarshal(n.Plugins[0], &first) != nil ||
		first.Type != plugin || first.RunDir != c.paths.RunDir {
		return nil, fmt.Errorf("%s %w", c.path(), errForeign)
	}
	return content, nil
}

// write writes the desired content. It reports whether the file changed.
func (c configuration) write() (changed bool, err error) {
	have, err := c.read()
	if err != nil || slices.Equal(have, c.content()) {
		return false, err
	}
	return true, durable.WriteFile(c.path(), c.content(), 0o644, durable.SyncAll)
}

// remove removes the file, and reports whether it existed.
func (c configuration) remove() (bool, error) {
	if have, err := c.read(); err != nil || have == nil {
		return false, err
	}
	return durable.Remove(c.path(), durable.SyncAll)
}

// preferred returns the files in the directory that the runtime would use instead of this one.
func (c configuration) preferred() ([]string, error) {
	entries, err := os.ReadDir(c.directory) // sorted by name
	if err != nil {
		return nil, err
	}
	var names []string
	for _, e := range entries {
		switch filepath.Ext(e.Name()) {
		case ".conf", ".conflist", ".json":
			if e.Name() < c.name && !e.IsDir() {
				names = append(names, e.Name())
			}
		}
	}
	return names, nil
}
