// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package nodeobject

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/sluice-net/sluice/kit/leaktest"
	"github.com/sluice-net/sluice/kit/log"
	"github.com/sluice-net/sluice/kit/watch"
	"github.com/sluice-net/sluice/kube"
	"github.com/sluice-net/sluice/services/ipam/internal/ipam"
	"github.com/sluice-net/sluice/services/ipam/internal/poolevents"
)

func TestMain(m *testing.M) { leaktest.Main(m) }

func TestANodeThatStaysWithoutRangesNamesTheFlags(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var reported error
		n := &Node{Options: Options{Name: "node-a", Report: func(err error) { reported = err }, Log: log.Discard()}}
		_, why := n.wanted(&object{})
		for range 20 {
			n.report(why)
			if strings.Contains(reported.Error(), "--allocate-node-cidrs") {
				t.Fatalf("%v before 30 s", reported)
			}
			time.Sleep(1500 * time.Millisecond)
		}
		n.report(why)
		const want = "the Node node-a has no spec.podCIDRs, for 30s: kube-controller-manager assigns ranges with " +
			"--allocate-node-cidrs and --cluster-cidr"
		if reported.Error() != want {
			t.Errorf("after 30 s: %v, want %s", reported, want)
		}
		n.report(nil)
		time.Sleep(time.Hour)
		n.report(why)
		if reported.Error() != why.Error() {
			t.Errorf("when they go after they were there: %v", reported)
		}
		if n.report(nil); reported != nil || n.Problem() != nil {
			t.Errorf("with a range: %v", reported)
		}
	})
}

func TestWhatANodeSaysIsReadOrRefusedByName(t *testing.T) {
	n := &Node{Options: Options{Name: "node-a"}}
	for name, c := range map[string]struct {
		spec corev1.NodeSpec
		want string // the ranges, or a part of the error
	}{
		"both families": {
			corev1.NodeSpec{PodCIDR: "10.1.0.0/24", PodCIDRs: []string{"10.1.0.0/24", "fd00:1::/64"}},
			"10.1.0.0/24 fd00:1::/64",
		},
		"the older field": {corev1.NodeSpec{PodCIDR: "10.1.0.0/24"}, "10.1.0.0/24"},
		"none":            {corev1.NodeSpec{}, "Node node-a has no spec.podCIDRs"},
		"no range":        {corev1.NodeSpec{PodCIDRs: []string{"ten"}}, `Node node-a: spec.podCIDRs[0]: "ten" is not a CIDR`},
		"loopback": {
			corev1.NodeSpec{PodCIDRs: []string{"127.0.0.0/24"}},
			"spec.podCIDRs[0]: 127.0.0.0/24 overlaps the loopback range",
		},
		"two that overlap": {
			corev1.NodeSpec{PodCIDRs: []string{"10.1.0.0/24", "10.1.0.128/25"}},
			"spec.podCIDRs[1]: 10.1.0.128/25 overlaps",
		},
		"too small for a pod": {
			corev1.NodeSpec{PodCIDRs: []string{"10.1.0.0/31"}},
			"spec.podCIDRs[0]: 10.1.0.0/31 is too small",
		},
	} {
		got, err := n.wanted(trim(&corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: "node-a"}, Spec: c.spec}))
		text := strings.Trim(fmt.Sprint(got), "[]")
		if err != nil {
			text = err.Error()
		}
		if !strings.Contains(text, c.want) {
			t.Errorf("%s: %q, want %q", name, text, c.want)
		}
	}
	if _, err := n.wanted(nil); err == nil || !strings.Contains(err.Error(), "does not exist") {
		t.Errorf("no Node: %v", err)
	}
}

// ranges imitates an ipam that accepts all ranges, or refuses all.
type ranges struct {
	hub *watch.Hub[netip.Prefix, ipam.Range]
	err error
}

func (r *ranges) Hub() *watch.Hub[netip.Prefix, ipam.Range] { return r.hub }

func (r *ranges) SetRanges(_ context.Context, wanted []netip.Prefix) error {
	if r.err == nil {
		for _, p := range wanted {
			r.hub.Upsert(p, ipam.Range{})
		}
	}
	return r.err
}

func TestNodeIsDoneOnceItsRangesServe(t *testing.T) {
	const text = "10.1.0.0/24"
	node := &object{podCIDRs: []string{text}, serving: text, taint: -1}
	for name, c := range map[string]struct {
		object *object
		err    error
		done   bool
	}{
		"its ranges serve":     {object: node, done: true},
		"it was not read":      {},
		"it has no ranges":     {object: &object{taint: -1}},
		"ipam takes no ranges": {object: &object{podCIDRs: []string{text}, taint: -1}, err: errors.New("the disk is full")},
	} {
		r := &ranges{watch.NewHub[netip.Prefix, ipam.Range](watch.Options[ipam.Range]{}), c.err}
		n := &Node{Options: Options{
			Name: "node-a", Ranges: r, Addresses: poolevents.New(nil), Report: func(error) {}, Log: log.Discard(),
		}, object: c.object}
		if done := n.step(t.Context()); done != c.done {
			t.Errorf("%s: done %v, want %v; problem %v", name, done, c.done, n.Problem())
		}
	}
}

// TestRestoredServerIsAProblemUntilTheNodeIsRead: while ranges serve, only this failure is reported as a problem.
func TestRestoredServerIsAProblemUntilTheNodeIsRead(t *testing.T) {
	n := &Node{wake: make(chan struct{}, 1)}
	restored := &kube.RestoredError{}
	for _, c := range []struct {
		failed error
		want   bool
	}{
		{nil, false},
		{errors.New("connection refused"), false},
		{restored, true},
		{nil, false},
		{fmt.Errorf("list nodes: %w", restored), true},
	} {
		n.Failed(c.failed)
		if got := n.Restored(); (got != nil) != c.want {
			t.Errorf("after %v the problem is %v, want one: %t", c.failed, got, c.want)
		}
	}
}
