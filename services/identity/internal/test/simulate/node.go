// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/netip"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"time"

	"google.golang.org/grpc"

	"github.com/sluice-net/sluice/kit/rpc/client"
	identityv1 "github.com/sluice-net/sluice/proto/gen/sluice/identity/v1"
	workloadv1 "github.com/sluice-net/sluice/proto/gen/sluice/workload/v1"
)

// node is a full node: a process of sluice-identity, and the readers of its watches.
type node struct {
	*process
	name     string
	index    int
	dir      string
	command  []string
	conn     *grpc.ClientConn
	identity identityv1.IdentityServiceClient
	cluster  identityv1.ClusterServiceClient
	view     *view
	http     *http.Client
	profiles sync.WaitGroup
}

// startNode starts a node with its own directory.
func startNode(ctx context.Context, bin, dir, name string, index int, etcd string, c *cluster) (n *node, err error) {
	n = &node{name: name, index: index, dir: filepath.Join(dir, name)}
	socket := filepath.Join(n.dir, "identity.sock")
	if err := os.MkdirAll(filepath.Join(n.dir, "state"), 0o700); err != nil {
		return nil, err
	}
	n.command = []string{
		filepath.Join(bin, "sluice-identity"), "--node=" + name, "--etcd-endpoints=" + etcd,
		"--state-dir=" + filepath.Join(n.dir, "state"), "--socket-path=" + socket, "--socket-group=-1",
		"--socket-also-root=" + strconv.Itoa(os.Getuid()),
		"--metrics-address=" + filepath.Join(n.dir, "metrics.sock"), "--metrics-pprof=true",
	}
	dial := func(ctx context.Context, _, _ string) (net.Conn, error) {
		return (&net.Dialer{}).DialContext(ctx, "unix", filepath.Join(n.dir, "metrics.sock"))
	}
	n.http = &http.Client{Transport: &http.Transport{DialContext: dial}}
	if err := n.again(ctx); err != nil {
		return nil, err
	}
	if n.conn, err = client.Dial(socket, client.Options{Timeout: patience, WaitForReady: true}); err != nil {
		return n, err
	}
	n.identity, n.cluster = identityv1.NewIdentityServiceClient(n.conn), identityv1.NewClusterServiceClient(n.conn)
	n.view = newView(n, c)
	return n, nil
}

// again starts the node's process, for the first time or after kill.
func (n *node) again(ctx context.Context) (err error) {
	n.process, err = startProcess(filepath.Join(n.dir, "log"), n.command[0], n.command[1:]...)
	if n.view != nil {
		n.view.restarted()
	}
	return errors.Join(err, ctx.Err())
}

func (n *node) kill() { n.signal(syscall.SIGKILL) }

func (n *node) stop() {
	if n.view != nil {
		n.view.close()
	}
	n.profiles.Wait()
	n.http.CloseIdleConnections()
	n.signal(syscall.SIGTERM)
	if n.conn != nil {
		n.conn.Close()
	}
}

// publish registers the node, and gives it endpoints as its datapath does.
func (n *node) publish(ctx context.Context, endpoints int) error {
	own := netip.AddrFrom4([4]byte{172, 31, 0, byte(1 + n.index)})
	podRange := netip.PrefixFrom(netip.AddrFrom4([4]byte{10, 200, byte(n.index), 0}), 24)
	overlay := podRange.Addr().Next()
	if _, err := n.cluster.RegisterNode(ctx, &identityv1.RegisterNodeRequest{
		Underlay: &identityv1.Underlay{
			Addresses: []string{own.String()}, OverlayAddresses: []string{overlay.String()},
			Mode: identityv1.RoutingMode_ROUTING_MODE_OVERLAY, TunnelPort: 4789, Mtu: 1450,
		},
		PodRanges: &identityv1.PodRanges{Prefixes: []string{podRange.String()}},
	}); err != nil {
		return err
	}
	says := map[string]uint32{own.String() + "/32": 6, overlay.String() + "/32": 6}
	for i, a := 0, overlay.Next(); i < endpoints; i, a = i+1, a.Next() {
		answer, err := n.identity.ResolveEndpoint(ctx, &identityv1.ResolveEndpointRequest{
			Owner:     &workloadv1.Owner{ContainerId: fmt.Sprintf("%s-%d", n.name, i), InterfaceName: "eth0"},
			Labels:    []*workloadv1.Label{{Source: "k8s", Key: "full", Value: fmt.Sprint(i % 5)}},
			Addresses: []string{a.String()},
		})
		if err != nil {
			return err
		}
		says[a.String()+"/32"] = answer.GetIdentity().GetNumber()
	}
	n.view.world.says(n.name, says)
	return nil
}

// memory is in MiB; the heap after a collection.
type memory struct{ heap, resident, peak float64 }

func (n *node) memory(ctx context.Context) (m memory, err error) {
	m.resident, m.peak = n.resident()
	if _, err := n.get(ctx, "/debug/pprof/heap?gc=1"); err != nil {
		return m, err
	}
	text, err := n.get(ctx, "/metrics")
	if err != nil {
		return m, err
	}
	for line := range strings.Lines(string(text)) {
		if number, ok := strings.CutPrefix(line, "go_memstats_heap_alloc_bytes "); ok {
			bytes, err := strconv.ParseFloat(strings.TrimSpace(number), 64)
			m.heap = bytes / (1 << 20)
			return m, err
		}
	}
	return m, errors.New("the metrics have no go_memstats_heap_alloc_bytes")
}

// kept returns the memory use after the node has written the changes that it batches in memory for 10 s.
func (n *node) kept(ctx context.Context) (m memory, err error) {
	tick := time.NewTicker(time.Second)
	defer tick.Stop()
	for range 15 {
		select {
		case <-tick.C:
		case <-ctx.Done():
			return m, ctx.Err()
		}
		now, err := n.memory(ctx)
		if err != nil {
			return m, err
		}
		if m.heap == 0 || now.heap < m.heap {
			m = now
		}
	}
	return m, nil
}

func (n *node) get(ctx context.Context, path string) ([]byte, error) {
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, "http://node"+path, nil)
	if err != nil {
		return nil, err
	}
	resp, err := n.http.Do(req)
	if err != nil {
		return nil, err
	}
	defer resp.Body.Close()
	return io.ReadAll(resp.Body)
}

// profile takes a CPU profile for some seconds; profiled waits for it.
func (n *node) profile(ctx context.Context, dir, name string, seconds int) {
	if dir == "" {
		return
	}
	n.profiles.Go(func() {
		content, err := n.get(ctx, fmt.Sprint("/debug/pprof/profile?seconds=", seconds))
		if err == nil {
			err = os.WriteFile(filepath.Join(dir, name+".cpu"), content, 0o600)
		}
		if err != nil {
			fmt.Fprintln(os.Stderr, "simulate: profile:", err)
		}
	})
}

func (n *node) profiled() { n.profiles.Wait() }

func (n *node) heap(ctx context.Context, dir string) error {
	if dir == "" {
		return nil
	}
	content, err := n.get(ctx, "/debug/pprof/heap?gc=1")
	if err != nil {
		return err
	}
	return os.WriteFile(filepath.Join(dir, "load.heap"), content, 0o600)
}

// equal waits until the node's watches have exactly the written keys.
func (n *node) equal(ctx context.Context, c *cluster) error {
	nodes, mappings := c.desired(n.name)
	deadline := time.Now().Add(patience)
	for {
		err := n.view.equal(nodes, mappings, c)
		if err == nil || time.Now().After(deadline) {
			return err
		}
		if err := sleep(ctx, 20*time.Millisecond); err != nil {
			return err
		}
	}
}
