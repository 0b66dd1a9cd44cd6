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

// plugin is the CNI plugin, as a file and as a type.
const plugin = "sluice-cni"

// configuration is the file that a container runtime reads.
type configuration struct {
	directory string // of the runtime
	name      string // the first name in the directory wins
	plugins   string // directory of the plugins
	paths     instance.Paths
	// translates: the datapath leads ports of the machine to containers, as it does
	// services.
	translates bool
}

func (c configuration) path() string { return filepath.Join(c.directory, c.name) }

type network struct {
	CNIVersion string            `json:"cniVersion"`
	Name       string            `json:"name"`
	Plugins    []json.RawMessage `json:"plugins"`
}

// content is what the file shall be. Ports of the machine are opened by the datapath or
// else by the reference plugin, if the machine has it.
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
		panic(err) // of maps and strings
	}
	return append(b, '\n')
}

func encode(v any) json.RawMessage {
	b, err := json.Marshal(v)
	if err != nil {
		panic(err) // of maps and strings
	}
	return b
}

// portMappings is the capability of a plugin that opens ports of the machine.
const portMappings = "portMappings"

// What opens ports of the machine.
const (
	openerSluice  = "sluice"
	openerPortmap = "portmap" // the reference plugin
	openerNone    = "none"
)

// opener says what opens ports of the machine, which is hostPort in a pod.
func (c configuration) opener() string {
	if c.translates {
		return openerSluice
	}
	if _, err := os.Stat(filepath.Join(c.plugins, openerPortmap)); err != nil {
		return openerNone
	}
	return openerPortmap
}

// errForeign: a file of the name is there, and another program wrote it.
var errForeign = errors.New("is another network's; it was left as it is")

// read returns the file if it is ours, nil if there is none.
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

// write makes the file what it shall be, and says whether it was not.
func (c configuration) write() (changed bool, err error) {
	have, err := c.read()
	if err != nil || slices.Equal(have, c.content()) {
		return false, err
	}
	return true, durable.WriteFile(c.path(), c.content(), 0o644, durable.SyncAll)
}

// remove removes the file if it is ours, and says whether it was there.
func (c configuration) remove() (bool, error) {
	if have, err := c.read(); err != nil || have == nil {
		return false, err
	}
	return durable.Remove(c.path(), durable.SyncAll)
}

// preferred lists the files that the runtime takes instead.
func (c configuration) preferred() ([]string, error) {
	entries, err := os.ReadDir(c.directory) // by name
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
