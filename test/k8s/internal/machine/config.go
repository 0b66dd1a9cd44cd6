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

// Config is the configuration of a machine.
type Config struct {
	// Dir is the run directory, which contains all files of a cluster.
	Dir string
	// Nodes is the number of nodes.
	Nodes int
	// Binaries is the directory of the Kubernetes programs, Etcd the program of a development etcd.
	Binaries, Etcd string
	// Containerd is the path of containerd. Its shim and ctr must be in the same directory.
	Containerd string
	// KubeProxy runs kube-proxy on every node.
	KubeProxy bool
	// Mounts are directories of the host that each node mounts at the same path, read-only.
	Mounts []string
}

// apiAddress and apiAddress6 are the control plane's addresses on the bridge to the nodes. The API is served only on
// apiAddress.
const (
	apiAddress  = "10.200.0.1"
	apiAddress6 = "fd00:200::1"
)

// NodeName returns the name of the node with an index, from 0.
func NodeName(index int) string { return fmt.Sprintf("node%d", index+1) }

// NodeAddress returns the node's IPv4 address on the bridge.
func NodeAddress(index int) string { return fmt.Sprintf("10.200.0.%d", 11+index) }

// NodeAddress6 returns the node's IPv6 address on the bridge.
func NodeAddress6(index int) string { return fmt.Sprintf("fd00:200::%d", 11+index) }

// Plane returns the control plane of the machine.
func (c Config) Plane() controlplane.Plane {
	return controlplane.Plane{
		Binaries: c.Binaries, Dir: c.PKI(), Address: apiAddress, Port: 6443, Etcd: "http://127.0.0.1:2379",
	}
}

// PKI returns the directory of certificates and kubeconfig files.
func (c Config) PKI() string { return filepath.Join(c.Dir, "pki") }

// Logs returns the directory of all logs.
func (c Config) Logs() string { return filepath.Join(c.Dir, "logs") }

// Images returns the directory of the archives that each node imports.
func (c Config) Images() string { return filepath.Join(c.Dir, "images") }

// Node returns the directory of a node's files that outlive the node: cni contains its CNI configuration, and
// containerd and kubelet have directories of their own.
func (c Config) Node(index int) string { return filepath.Join(c.Dir, NodeName(index)) }

// Cgroup returns the path of the machine's cgroups.
func (c Config) Cgroup() string { return Cgroup(c.Dir) }

// Cgroup returns the path of the cgroups of the cluster with the run directory.
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
