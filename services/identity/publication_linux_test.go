// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package main

import (
	"context"
	"fmt"
	"path/filepath"
	"strings"
	"testing"

	clientv3 "go.etcd.io/etcd/client/v3"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/sluice-net/sluice/kit/servicetest"
	identityv1 "github.com/sluice-net/sluice/proto/gen/sluice/identity/v1"
	workloadv1 "github.com/sluice-net/sluice/proto/gen/sluice/workload/v1"
)

// publicationPoints are the fault points of registrations and publications.
var publicationPoints = []string{
	"identity/register/before-save", "identity/register/before-answer",
	"identity/register/before-txn", "identity/register/after-txn",
	"identity/publish/before-txn", "identity/publish/after-txn",
}

// publisher is a node with one range and endpoints at one address of it, and a
// second node that watches.
type publisher struct {
	t       *testing.T
	p       *proc
	admin   *clientv3.Client
	watcher identityv1.ClusterServiceClient
}

const (
	publishedRange   = "10.9.0.0/24"
	publishedAddress = "10.9.0.5"
)

func (b *bench) startPublisher() *publisher {
	b.t.Helper()
	b.Mkdir("run2")
	b.Mkdir("state2")
	other := b.startAt(filepath.Join(b.Dir, "run2", "identity.sock"),
		"--state-dir", filepath.Join(b.Dir, "state2"), "--node", "n2")
	other.Serving()
	p := b.start()
	p.Serving()
	return &publisher{t: b.t, p: p, admin: b.etcd.Client(), watcher: identityv1.NewClusterServiceClient(other.Conn)}
}

// register registers the range once; the range is in etcd when registered is true.
func (n *publisher) register() (registered bool, err error) {
	resp, err := identityv1.NewClusterServiceClient(n.p.Conn).RegisterNode(servicetest.Context(n.t),
		&identityv1.RegisterNodeRequest{PodRanges: &identityv1.PodRanges{Prefixes: []string{publishedRange}}})
	return resp.GetRegistered(), err
}

// registered waits until etcd has the range.
func (n *publisher) registered() {
	n.t.Helper()
	servicetest.EventuallyNil(n.t, "the registration", func() error {
		registered, err := n.register()
		if err == nil && !registered {
			err = fmt.Errorf("it waits")
		}
		return err
	})
}

// has reports which of two endpoints has the address.
func (n *publisher) has(container string) (number uint32, err error) {
	resp, err := n.p.ResolveEndpoint(servicetest.Context(n.t), &identityv1.ResolveEndpointRequest{
		Owner:     &workloadv1.Owner{ContainerId: container, InterfaceName: "eth0"},
		Labels:    []*workloadv1.Label{{Source: "cni", Key: "app", Value: container}},
		Addresses: []string{publishedAddress},
	})
	return resp.GetIdentity().GetNumber(), err
}

// wantHolder waits until etcd and the other node have the address with a number (0: no number), and no other address of
// this node.
func (n *publisher) wantHolder(number uint32) {
	n.t.Helper()
	servicetest.EventuallyNil(n.t, fmt.Sprintf("the address with identity %d", number), func() error {
		if err := n.inEtcd(n.t.Context(), number); err != nil {
			return err
		}
		resp, err := n.watcher.GetIPMapping(n.t.Context(), &identityv1.GetIPMappingRequest{Address: publishedAddress})
		if err != nil {
			return err
		}
		m := resp.GetMapping()
		if m.GetIdentity() != number || resp.GetRange() != publishedRange || resp.GetRangeNode() != "n1" {
			return fmt.Errorf("the other node has %v", resp)
		}
		return nil
	})
}

func (n *publisher) inEtcd(ctx context.Context, number uint32) error {
	got, err := n.admin.Get(ctx, "/sluice/v1/identity/ip/n1/ep/", clientv3.WithPrefix())
	if err != nil {
		return err
	}
	if number == 0 {
		if len(got.Kvs) > 0 {
			return fmt.Errorf("etcd has %v", got.Kvs)
		}
		return nil
	}
	if len(got.Kvs) != 1 || !strings.Contains(string(got.Kvs[0].Value), fmt.Sprintf(`"identity":%d,`, number)) {
		return fmt.Errorf("etcd has %v", got.Kvs)
	}
	return nil
}

// interrupted calls once while the process dies, or fails, at a point, and
// repeats the call only if it was not answered.
func (n *publisher) interrupted(b *bench, point string, kill bool, call func() error) {
	n.t.Helper()
	if kill {
		n.p.Faults.KillAt(point, 0)
	} else {
		n.p.Faults.FailAt(point, 0, "as the test wants")
	}
	err := call()
	if err != nil && status.Code(err) != codes.Unavailable {
		n.t.Fatalf("the call ended with %v", err)
	}
	if waitErr := n.p.Faults.WaitHits(servicetest.Context(n.t), point, 1); waitErr != nil {
		n.t.Fatal(waitErr)
	}
	if kill {
		n.p.Killed()
		n.p = b.start()
		n.p.Serving()
	} else {
		n.p.Faults.Pass(point)
	}
	if err != nil {
		servicetest.EventuallyNil(n.t, "the same call again", call)
	}
}

// TestKernelKilledAnywhereLosesNoRegistrationOrMapping proves INV-84: a range or mapping that was confirmed to the
// caller reaches etcd and the other nodes; a removed one is removed there. No key is written twice, wherever the
// process is killed.
func TestKernelKilledAnywhereLosesNoRegistrationOrMapping(t *testing.T) {
	for _, point := range publicationPoints {
		for _, kill := range []bool{true, false} {
			t.Run(fmt.Sprintf("%s/%v", point, kill), func(t *testing.T) {
				b := newBench(t)
				n := b.startPublisher()
				if strings.HasPrefix(point, "identity/register/") {
					n.interrupted(b, point, kill, func() error { _, err := n.register(); return err })
				} else {
					n.registered()
				}
				var first, second uint32
				resolve := func() (err error) { first, err = n.has("first"); return err }
				release := func() error { _, err := n.p.release("first"); return err }
				if strings.HasPrefix(point, "identity/publish/") {
					n.interrupted(b, point, kill, resolve)
					n.wantHolder(first)
					n.interrupted(b, point, kill, release)
				} else {
					servicetest.EventuallyNil(t, "the identity", resolve)
					n.wantHolder(first)
					servicetest.EventuallyNil(t, "the release", release)
				}
				n.wantHolder(0)
				servicetest.EventuallyNil(t, "the next identity", func() (err error) {
					second, err = n.has("second")
					return err
				})
				if first == second {
					t.Fatalf("two label sets have identity %d", first)
				}
				n.wantHolder(second)
				n.registered()
			})
		}
	}
}
