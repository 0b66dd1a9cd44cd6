// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

//go:build upgrade

package cluster

import (
	"context"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"testing"

	"github.com/sluice-net/sluice/devnode"
	"github.com/sluice-net/sluice/test/internal/pod"
)

// programs are the programs of a node, by service.
var programs = map[string]string{
	devnode.Identity: "sluice-identity", devnode.IPAM: "sluice-ipam", devnode.Policy: "sluice-policy",
	devnode.Datapath: "sluice-datapath", devnode.LoadBalancer: "sluice-loadbalancer", "": "sluice-cni",
}

// oldPrograms returns SLUICE_OLD_BIN and a directory with copies of its programs, which install replaces.
func oldPrograms(t *testing.T) (old, bin string) {
	t.Helper()
	old = os.Getenv("SLUICE_OLD_BIN")
	if old == "" {
		t.Fatal("SLUICE_OLD_BIN is not set: run make test-upgrade")
	}
	bin = t.TempDir()
	for dir := bin; dir != os.TempDir() && dir != "/"; dir = filepath.Dir(dir) {
		if err := os.Chmod(dir, 0o755); err != nil { //nolint:gosec // the services' users execute its files
			t.Fatal(err)
		}
	}
	for _, name := range programs {
		install(t, old, bin, name)
	}
	install(t, binDir(), bin, "sluice-devetcd")
	install(t, binDir(), bin, "sluice-dns") // the old build may lack it
	return old, bin
}

// install replaces a program atomically.
func install(t *testing.T, from, to, name string) {
	t.Helper()
	in, err := os.Open(filepath.Join(from, name))
	if err != nil {
		t.Fatal(err)
	}
	defer in.Close()
	out, err := os.OpenFile(filepath.Join(to, name+".new"), os.O_CREATE|os.O_WRONLY|os.O_TRUNC, 0o755)
	if err == nil {
		_, err = io.Copy(out, in)
	}
	if err == nil {
		err = out.Close()
	}
	if err == nil {
		err = os.Rename(out.Name(), filepath.Join(to, name))
	}
	if err != nil {
		t.Fatal(err)
	}
}

// TestConnectionsOutliveUpgrades upgrades from the programs of SLUICE_OLD_BIN, a build without traffic between nodes,
// to this build, into each routing mode, and back. Connections between pods and with the host survive, and pods are
// added and removed after each step. The test needs an old build, so only `make test-upgrade` runs it.
func TestConnectionsOutliveUpgrades(t *testing.T) {
	old, bin := oldPrograms(t)
	up, err := devnode.Up(t.Context(), devnode.Options{
		Instance: random("t"), BinDir: bin, StartTimeout: patience,
		Args: map[string][]string{devnode.IPAM: {"--quarantine=1s"}},
	})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		ctx, cancel := context.WithTimeout(context.Background(), patience)
		defer cancel()
		if err := devnode.Down(ctx, up.Instance()); err != nil {
			t.Error(err)
		}
	})
	n := connect(t, up)
	from, to := n.add(t, "client"), n.add(t, "web")
	flows := append(openFlows(t, from, to, 50), openFlows(t, from, n.hostAt(), 50)...)
	step := func(when string) {
		t.Helper()
		for i, f := range flows {
			if err := f.speak(); err != nil {
				t.Fatalf("%s: connection %d: %v", when, i, err)
			}
		}
		p := n.add(t, "new")
		for _, a := range to.Addresses() {
			if err := exchange(t.Context(), p, to, a); err != nil {
				t.Fatalf("%s: a new pod: %v", when, err)
			}
		}
		n.del(t, p)
	}
	step("at first")
	change := func(dir, what string, services ...string) {
		t.Helper()
		install(t, dir, bin, programs[""])
		for _, service := range services {
			install(t, dir, bin, programs[service])
			if err := n.Restart(t.Context(), service); err != nil {
				t.Fatal(err)
			}
			step(fmt.Sprintf("%s of %s", what, service))
		}
	}
	services := []string{devnode.Identity, devnode.IPAM, devnode.Policy, devnode.Datapath}
	change(binDir(), "the upgrade", services...)
	for _, mode := range []string{"overlay", "native", "none"} {
		if err := n.SetArgs(devnode.Datapath, "--routing-mode="+mode); err != nil {
			t.Fatal(err)
		}
		if err := n.Restart(t.Context(), devnode.Datapath); err != nil {
			t.Fatal(err)
		}
		step("routing mode " + mode)
	}
	if err := n.SetArgs(devnode.Datapath); err != nil {
		t.Fatal(err)
	}
	change(old, "the way back", devnode.Datapath, devnode.Policy, devnode.IPAM, devnode.Identity)
	change(binDir(), "the second upgrade", services...)
}

// hostAt returns the node itself, with the addresses of its link.
func (n *node) hostAt() pod.Pod { return n.host().WithAddresses(n.Addresses()) }

// TestNewConnectionsSucceedOverAnUpgrade makes connections of every kind while it replaces each program of a node by
// the program of this build, one after the other.
func TestNewConnectionsSucceedOverAnUpgrade(t *testing.T) {
	for _, mode := range modes {
		for _, packets := range []bool{false, true} {
			t.Run(fmt.Sprintf("%s, by packets %t", mode, packets), func(t *testing.T) {
				_, bin := oldPrograms(t)
				r := newRestarted(t, mode, packets, bin)
				r.forgets = true
				r.reach(t)
				for _, service := range r.here.Services() {
					r.during(t, service+" is replaced by this build's", func() error {
						install(t, binDir(), bin, programs[service])
						return r.here.Restart(t.Context(), service)
					})
				}
			})
		}
	}
}

// TestMixedVersionsTalk replaces the datapath of one of two nodes by the earlier version's, and back. Connections
// continue, and new connections succeed. On the node of this version, packets bypass the tunnel device all the time.
// On the other node, the program that decapsulates packets stays on the uplink, and passes them to the tunnel device.
func TestMixedVersionsTalk(t *testing.T) {
	old, bin := oldPrograms(t)
	for _, name := range programs {
		install(t, binDir(), bin, name)
	}
	c := newCluster(t, devnode.ClusterOptions{Nodes: 2, Routing: "overlay", Options: devnode.Options{BinDir: bin}})
	a, b := c.nodes[0], c.nodes[1]
	from, to := a.add(t, "client"), b.add(t, "web")
	var flows []flow
	for _, address := range to.Addresses() {
		f, err := openFlow(t.Context(), from, to, address)
		defer f.close()
		if err != nil {
			t.Fatal(err)
		}
		flows = append(flows, f)
	}
	check := func(when string, byDevice bool) {
		t.Helper()
		t.Log(when)
		for _, f := range flows {
			a.travels(t, f, false, false)
			b.travels(t, f, byDevice, byDevice)
		}
		for i, address := range to.Addresses() {
			if err := exchange(t.Context(), from, to, address); err != nil {
				t.Errorf("%s: a new connection to %v: %v", when, address, err)
			}
			if err := exchange(t.Context(), to, from, from.Addresses()[i]); err != nil {
				t.Errorf("%s: a new connection from %v: %v", when, address, err)
			}
		}
	}
	change := func(dir string) {
		t.Helper()
		install(t, dir, bin, programs[devnode.Datapath])
		if err := b.Restart(t.Context(), devnode.Datapath); err != nil {
			t.Fatal(err)
		}
	}
	check("both of this version", false)
	change(old)
	check("the other node of the earlier version", true)
	change(binDir())
	check("both of this version again", false)
}
