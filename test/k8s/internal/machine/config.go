// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package machine

import (
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"

	"github.com/sluice-net/sluice/test/k8s/internal/controlplane"
)

// Config is what a machine is started with.
type Config struct {
	// Dir is the run directory, which holds all that a cluster writes.
	Dir string
	// Nodes is how many there are.
	Nodes int
	// Binaries is the directory of the Kubernetes programs, Etcd a development
	// server of etcd.
	Binaries, Etcd string
	// Containerd is the daemon's program; its shim and ctr lie beside it.
	Containerd string
	// KubeProxy runs kube-proxy on every node.
	KubeProxy bool
	// Mounts are directories of the host that each node has under the same path,
	// read-only.
	Mounts []string
}

// apiAddress is the control plane's on the bridge to the nodes, apiAddress6 its
// other one, at which no API is served.
const (
	apiAddress  = "10.200.0.1"
	apiAddress6 = "fd00:200::1"
)

// NodeName is that of the node with the index, from 0.
func NodeName(index int) string { return fmt.Sprintf("node%d", index+1) }

// NodeAddress is its IPv4 address on the bridge.
func NodeAddress(index int) string { return fmt.Sprintf("10.200.0.%d", 11+index) }

// NodeAddress6 is its IPv6 address there.
func NodeAddress6(index int) string { return fmt.Sprintf("fd00:200::%d", 11+index) }

// Plane is the control plane of the machine.
func (c Config) Plane() controlplane.Plane {
	return controlplane.Plane{
		Binaries: c.Binaries, Dir: c.PKI(), Address: apiAddress, Port: 6443, Etcd: "http://127.0.0.1:2379",
	}
}

// PKI is the directory of certificates and kubeconfig files.
func (c Config) PKI() string { return filepath.Join(c.Dir, "pki") }

// Logs is the directory of all logs.
func (c Config) Logs() string { return filepath.Join(c.Dir, "logs") }

// Images is the directory of the archives that each node imports.
func (c Config) Images() string { return filepath.Join(c.Dir, "images") }

// Node is the directory of a node's files that outlive it: cni has its CNI
// configuration, containerd and kubelet are theirs.
func (c Config) Node(index int) string { return filepath.Join(c.Dir, NodeName(index)) }

// Cgroup is the path of all cgroups of the machine.
func (c Config) Cgroup() string { return Cgroup(c.Dir) }

// Cgroup is the path of the cgroups of the cluster with the run directory.
func Cgroup(dir string) string { return "/sluice-k8s-" + filepath.Base(dir) }

func (c Config) path() string { return filepath.Join(c.Dir, "config.json") }

// Write makes the directories, and writes the configuration for Read.
func (c Config) Write() error {
	dirs := []string{c.PKI(), c.Logs(), c.Images()}
	for i := range c.Nodes {
		for _, dir := range []string{"cni", "containerd", "kubelet", "kubernetes", "manifests"} {
			dirs = append(dirs, filepath.Join(c.Node(i), dir))
		}
		dirs = append(dirs, filepath.Join(c.Logs(), NodeName(i)))
	}
	for _, dir := range dirs {
		if err := os.MkdirAll(dir, 0o755); err != nil {
			return err
		}
	}
	content, err := json.MarshalIndent(c, "", "  ")
	if err != nil {
		return err
	}
	return os.WriteFile(c.path(), content, 0o600)
}

// Read reads the configuration of the run directory.
func Read(dir string) (Config, error) {
	var c Config
	content, err := os.ReadFile(filepath.Join(dir, "config.json"))
	if err != nil {
		return c, err
	}
	return c, json.Unmarshal(content, &c)
}
