// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package main

import (
	"bytes"
	"context"
	"crypto/rand"
	"encoding/hex"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sluice-net/sluice/devnode"
	"github.com/sluice-net/sluice/test/internal/cni"
	"github.com/sluice-net/sluice/test/internal/pod"
)

// clusterInstance is the name of the cluster in the second part. Its nodes append "-1" and so on.
const clusterInstance = "demo-nodes"

// several is the second part: three nodes that share an etcd.
type several struct {
	demo    *demo
	cluster *devnode.Cluster
	nodes   []*devnode.Node
	pods    []pod.Pod // one on each node: web, client and visitor, in this order
}

// runNodes shows packets between nodes, a policy across them, and a node whose
// processes are killed.
func (d *demo) runNodes(ctx context.Context) (err error) {
	s := &several{demo: d}
	defer func() {
		err = errors.Join(err, s.cleanUp())
	}()
	return d.steps(ctx, []step{
		{"Start three nodes that share an etcd; packets between their pods travel in a tunnel (VXLAN)", s.start},
		{"Run a pod on each: every node learns the addresses and identities of the other nodes' pods", s.startPods},
		{"Let pods of different nodes talk, over IPv4 and IPv6", s.talk},
		{"Put one policy on all nodes: web may be called by the client only, wherever either runs", s.applyPolicy},
		{"Kill every process of the client's node: its packets flow on, under the same policy", s.kill},
	})
}

func (s *several) start(ctx context.Context) (err error) {
	// Remove the nodes of an interrupted demo.
	if err := devnode.Down(ctx, clusterInstance); err != nil {
		return err
	}
	begin := time.Now()
	s.cluster, err = devnode.UpCluster(ctx, devnode.ClusterOptions{
		Options: devnode.Options{Instance: clusterInstance, BinDir: s.demo.binDir}, Nodes: 3,
	})
	if err != nil {
		return err
	}
	if s.nodes, err = s.cluster.Nodes(); err != nil {
		return err
	}
	fmt.Printf("   up in %.1f s\n\n", time.Since(begin).Seconds())
	return s.demo.show(ctx, "sluice", "--instance", s.nodes[0].Instance(), "node", "list")
}

func (s *several) startPods(ctx context.Context) error {
	for i, app := range []string{"web", "client", "visitor"} {
		n := s.nodes[i]
		var b [6]byte
		rand.Read(b[:]) //nolint:errcheck // never fails
		p := pod.Pod{Name: app, Netns: pod.NetnsPath("sluice-" + clusterInstance + "-" + app)}
		if err := pod.NewNetns(p.Netns); err != nil {
			return err
		}
		s.pods = append(s.pods, p)
		config, err := cni.PluginConfig(n.CNIConflist(), "1.0.0", map[string]any{
			"runtimeConfig": map[string]any{"labels": []map[string]string{{"key": "app", "value": app}}},
		})
		if err != nil {
			return err
		}
		begin := time.Now()
		result, err := cni.Run(ctx, cni.Call{
			Plugin: n.Plugin(), Command: "ADD", ContainerID: hex.EncodeToString(b[:]), Netns: p.Netns, IfName: "eth0",
			Args: "IgnoreUnknown=1;K8S_POD_NAMESPACE=demo;K8S_POD_NAME=" + app, Path: filepath.Dir(n.Plugin()),
			Config: config,
		})
		if err != nil {
			return err
		}
		addresses, err := cni.Addresses(result)
		if err != nil {
			return err
		}
		s.pods[i] = p.WithAddresses(addresses)
		fmt.Printf("   pod demo/%-7s on %s, %s and %s, in %d ms\n", app, n.Name(), s.pods[i].IPv4, s.pods[i].IPv6,
			time.Since(begin).Milliseconds())
	}
	return nil
}

// reach retries until an exchange succeeds: the nodes may not have learned the pods' addresses yet.
func reach(ctx context.Context, from, to pod.Pod, address netip.Addr, message []byte) error {
	for {
		attempt, cancel := context.WithTimeout(ctx, time.Second)
		err := pod.ExchangeTCP(attempt, from, to, address, message)
		cancel()
		if err == nil || ctx.Err() != nil {
			return err
		}
	}
}

func (s *several) talk(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, patience)
	defer cancel()
	message := bytes.Repeat([]byte("sluice "), 10000)
	web := s.pods[0]
	for _, from := range s.pods[1:] {
		for _, address := range web.Addresses() {
			if err := reach(ctx, from, web, address, message); err != nil {
				return err
			}
			rtt, ttl, err := from.Ping(ctx, address)
			if err != nil {
				return err
			}
			begin := time.Now()
			if err := pod.ExchangeTCP(ctx, from, web, address, message); err != nil {
				return err
			}
			fmt.Printf("   %-7s → web  %-18s ping %d µs, ttl %d; TCP: %d bytes there and back in %.1f ms\n", from.Name, address,
				rtt.Microseconds(), ttl, len(message), float64(time.Since(begin).Microseconds())/1000)
		}
	}
	return nil
}

const acrossNodes = `apiVersion: networking.k8s.io/v1
kind: NetworkPolicy
metadata: {name: web, namespace: demo}
spec:
  podSelector: {matchLabels: {app: web}}
  ingress:
  - from: [{podSelector: {matchLabels: {app: client}}}]
`

func (s *several) applyPolicy(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, patience)
	defer cancel()
	path := filepath.Join(s.cluster.Hub().PolicyDir(), "web.yaml")
	fmt.Printf("   $ cat > %s\n", path)
	for line := range strings.Lines(acrossNodes) {
		fmt.Printf("   %s", line)
	}
	fmt.Println()
	if err := os.WriteFile(path, []byte(acrossNodes), 0o644); err != nil { //nolint:gosec // sluice-policy reads the file
		return err
	}
	web, client, visitor := s.pods[0], s.pods[1], s.pods[2]
	for {
		attempt, cancel := context.WithTimeout(ctx, 300*time.Millisecond)
		err := pod.ExchangeTCP(attempt, visitor, web, web.IPv4, []byte("hello"))
		cancel()
		if err != nil {
			break
		}
		if ctx.Err() != nil {
			return errors.New("the policy was not enforced")
		}
	}
	if err := reach(ctx, client, web, web.IPv4, []byte("hello")); err != nil {
		return err
	}
	fmt.Printf("   client  → web  connected\n   visitor → web  dropped:\n\n")
	return s.demo.show(ctx, "sluice", "--instance", s.nodes[0].Instance(), "observe", "--since", "1m",
		"--reason", "policy-denied")
}

func (s *several) kill(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, patience)
	defer cancel()
	n := s.nodes[1]
	for _, service := range n.Services() {
		pid, err := n.PID(service)
		if err != nil {
			return err
		}
		if err := unix.Kill(pid, unix.SIGKILL); err != nil {
			return err
		}
	}
	fmt.Printf("   sluice-identity, -ipam, -policy, -loadbalancer, -datapath and -dns of %s have ended\n", n.Name())
	web, client := s.pods[0], s.pods[1]
	for _, address := range web.Addresses() {
		if err := pod.ExchangeTCP(ctx, client, web, address, []byte("hello")); err != nil {
			return err
		}
		fmt.Printf("   client → web  %-18s connected\n", address)
	}
	for _, service := range n.Services() {
		if err := n.Start(ctx, service); err != nil {
			return err
		}
	}
	fmt.Println("   and back again")
	return nil
}

func (s *several) cleanUp() error {
	s.demo.title("Clean up: end the nodes")
	var errs []error
	for _, p := range s.pods {
		errs = append(errs, pod.DeleteNetns(p.Netns))
	}
	errs = append(errs, devnode.Down(context.Background(), clusterInstance))
	for _, pattern := range []string{"/run/sluice-%s*", "/var/lib/sluice-%s*", "/run/netns/sluice-%s*"} {
		left, err := filepath.Glob(fmt.Sprintf(pattern, clusterInstance))
		errs = append(errs, err)
		if len(left) > 0 {
			errs = append(errs, fmt.Errorf("left: %v", left))
		}
	}
	err := errors.Join(errs...)
	if err == nil {
		fmt.Println("   no namespace, device, mount, directory or process is left")
	}
	return err
}
