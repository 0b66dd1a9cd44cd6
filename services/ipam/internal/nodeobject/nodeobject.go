// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

// Package nodeobject reads the ranges of this machine from spec.podCIDRs of its Node object. In annotations of the
// object, it publishes which ranges are in use, and whether they have addresses for new pods.
//
// It reads and writes no other object. It writes three annotations, sets the condition NetworkUnavailable from True to
// False, and removes the taint node.sluice.io/not-ready.
package nodeobject

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"net/netip"
	"slices"
	"strings"
	"sync"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/rest"

	"github.com/sluice-net/sluice/kit/log"
	"github.com/sluice-net/sluice/kit/watch"
	"github.com/sluice-net/sluice/kube"
	"github.com/sluice-net/sluice/model/podrange"
	"github.com/sluice-net/sluice/services/ipam/internal/ipam"
	"github.com/sluice-net/sluice/services/ipam/internal/pool"
)

// Annotations and the taint of the Node.
const (
	servingAnnotation  = "node.sluice.io/pod-ranges"
	drainingAnnotation = "node.sluice.io/draining-pod-ranges"
	notReadyTaint      = "node.sluice.io/not-ready"
)

// Field is the name of the ranges in errors.
const Field = "spec.podCIDRs"

// missingFor is how long a Node may have no ranges before this is reported as an error of the cluster.
const missingFor = 30 * time.Second

// errUnread means that the API server has neither answered nor failed yet.
var errUnread = errors.New("was not read yet")

// maxLabels is the maximum number of labels that identity's RegisterNode accepts.
const maxLabels = 1000

// retryEvery is the pause after a failure.
const retryEvery = 2 * time.Second

// Ranges gives access to the ranges of ipam.
type Ranges interface {
	SetRanges(ctx context.Context, ranges []netip.Prefix) error
	Hub() *watch.Hub[netip.Prefix, ipam.Range]
}

// Addresses reports whether there are addresses for new pods.
type Addresses interface {
	Note() podrange.Note
	Changed() <-chan struct{}
	// Adopt takes over the note that an earlier process has written to the object.
	Adopt(podrange.Note)
}

// Options of a Node.
type Options struct {
	Name      string // name of the object
	Ranges    Ranges
	Addresses Addresses
	// Report is called when the reason why no range serves changes: with that reason, or with nil once a range serves.
	Report func(error)
	Log    *slog.Logger
}

// Node follows the object.
type Node struct {
	Options
	api    *kube.Client
	client *rest.RESTClient
	wake   chan struct{}

	mu       sync.Mutex
	object   *object   // guarded by mu; nil: it does not exist, or is not known yet
	complete bool      // guarded by mu; the Node was listed
	away     error     // guarded by mu; why the API server does not deliver it
	problem  error     // guarded by mu; why no range serves
	missing  time.Time // guarded by mu; time since which no range serves

	logged string // of the loop
}

// object contains the fields of a Node that are kept.
type object struct {
	uid, version       string
	podCIDRs           []string
	labels             map[string]string
	serving, draining  string // annotations
	addresses          string // annotation of package podrange
	networkUnavailable bool
	taint              int // index of the taint; -1 if the Node does not have it
}

// New returns a Node, which does nothing until Run is called.
func New(c *kube.Client, o Options) (*Node, error) {
	client, err := c.REST(corev1.SchemeGroupVersion, corev1.AddToScheme)
	if err != nil {
		return nil, err
	}
	return &Node{Options: o, api: c, client: client, wake: make(chan struct{}, 1), missing: time.Now()}, nil
}

// trim implements kube.Kind: it keeps only the needed fields of an object.
func trim(o runtime.Object) *object {
	n := o.(*corev1.Node)
	kept := &object{
		uid: string(n.UID), version: n.ResourceVersion, podCIDRs: n.Spec.PodCIDRs,
		labels:  n.Labels,
		serving: n.Annotations[servingAnnotation], draining: n.Annotations[drainingAnnotation],
		addresses: n.Annotations[podrange.Annotation],
	}
	if len(kept.podCIDRs) == 0 && n.Spec.PodCIDR != "" {
		kept.podCIDRs = []string{n.Spec.PodCIDR}
	}
	kept.taint = slices.IndexFunc(n.Spec.Taints, func(t corev1.Taint) bool { return t.Key == notReadyTaint })
	kept.networkUnavailable = slices.ContainsFunc(n.Status.Conditions, func(c corev1.NodeCondition) bool {
		return c.Type == corev1.NodeNetworkUnavailable && c.Status == corev1.ConditionTrue
	})
	return kept
}

// Upsert implements kube.Handler.
func (n *Node) Upsert(_ types.NamespacedName, o *object) {
	if len(o.labels) > maxLabels {
		n.Log.Error("the Node has too many labels; no rule selects it by label", "labels", len(o.labels),
			"at most", maxLabels)
	}
	n.note(func() { n.object = o })
}

// Delete implements kube.Handler.
func (n *Node) Delete(types.NamespacedName) { n.note(func() { n.object, n.complete = nil, true }) }

// Complete implements kube.Handler.
func (n *Node) Complete() { n.note(func() { n.complete = true }) }

// Failed implements kube.Handler.
func (n *Node) Failed(err error) { n.note(func() { n.away = err }) }

func (n *Node) note(change func()) {
	n.mu.Lock()
	change()
	n.mu.Unlock()
	select {
	case n.wake <- struct{}{}:
	default:
	}
}

// Labels returns the labels of the object, by key; ok is false while the object is unknown or does not exist. If the
// object has more labels than identity accepts, Labels returns none. The caller must not change the map.
func (n *Node) Labels() (labels map[string]string, ok bool) {
	n.mu.Lock()
	defer n.mu.Unlock()
	switch {
	case n.object == nil:
		return nil, false
	case len(n.object.labels) > maxLabels:
		return nil, true // without ranges, labels are not needed: the node has no pods
	}
	return n.object.labels, true
}

// Problem returns the reason for which no range serves; nil if one does.
func (n *Node) Problem() error {
	n.mu.Lock()
	defer n.mu.Unlock()
	if n.problem == nil || time.Since(n.missing) < missingFor {
		return n.problem
	}
	return fmt.Errorf("%w, for %s: kube-controller-manager assigns ranges with --allocate-node-cidrs and --cluster-cidr",
		n.problem, time.Since(n.missing).Truncate(time.Second))
}

// Restored returns an error if the API server was restored from an older backup and the object has not been read
// since; nil otherwise.
func (n *Node) Restored() error {
	n.mu.Lock()
	defer n.mu.Unlock()
	var restored *kube.RestoredError
	if errors.As(n.away, &restored) {
		return restored
	}
	return nil
}

// Run follows the object until ctx ends.
func (n *Node) Run(ctx context.Context) error {
	followed := make(chan error, 1)
	go func() {
		followed <- kube.Follow(ctx, n.api, kube.Kind[*object]{
			Client: n.client, Resource: "nodes", Fields: "metadata.name=" + n.Name, Type: &corev1.Node{}, Trim: trim,
		}, n, n.Log)
	}()
	for {
		ranges, addresses := n.Ranges.Hub().Changed(), n.Addresses.Changed()
		var again <-chan time.Time
		if !n.step(ctx) {
			again = time.After(retryEvery) // the result of Problem also depends on the time
		}
		select {
		case <-n.wake:
		case <-ranges:
		case <-addresses:
		case <-again:
		case err := <-followed:
			return err
		}
	}
}

// step applies the object's ranges to ipam, and writes ipam's ranges to the object's annotations. It returns true if
// both succeeded and a range serves.
func (n *Node) step(ctx context.Context) (done bool) {
	n.mu.Lock()
	o, complete, away := n.object, n.complete, n.away
	n.mu.Unlock()
	var why error
	if o != nil || complete {
		var ranges []netip.Prefix
		ranges, why = n.wanted(o)
		if err := n.Ranges.SetRanges(ctx, ranges); err != nil {
			// The former ranges no longer belong to the Node, even if it has no new ones.
			why = errors.Join(fmt.Errorf("the Node %s: %w", n.Name, err), n.Ranges.SetRanges(ctx, nil))
		}
	}
	serving, draining := n.ranges()
	if why == nil && len(serving) == 0 && o == nil && !complete {
		if why = away; why == nil {
			why = fmt.Errorf("the Node %s %w", n.Name, errUnread)
		}
	}
	n.report(why)
	if o == nil {
		return why == nil
	}
	notes := annotations{
		serving: strings.Join(serving, ","), draining: strings.Join(draining, ","), addresses: n.addresses(o),
	}
	if err := n.write(ctx, o, notes); err != nil && ctx.Err() == nil {
		n.complain(fmt.Errorf("write on Node %s: %w", n.Name, err))
		return false
	}
	n.logged = ""
	return why == nil
}

// wanted returns the ranges of an object, or the reason for which it has none.
func (n *Node) wanted(o *object) (ranges []netip.Prefix, why error) {
	switch {
	case o == nil:
		return nil, fmt.Errorf("the Node %s does not exist", n.Name)
	case len(o.podCIDRs) == 0:
		return nil, fmt.Errorf("the Node %s has no %s", n.Name, Field)
	}
	ranges, err := pool.ParseRanges(Field, o.podCIDRs)
	if err != nil {
		return nil, fmt.Errorf("the Node %s: %w", n.Name, err)
	}
	return ranges, nil
}

// ranges returns the ranges of ipam.
func (n *Node) ranges() (serving, draining []string) {
	hub := n.Ranges.Hub()
	for _, p := range hub.Keys() {
		switch r, ok := hub.Get(p); {
		case !ok:
		case r.Draining:
			draining = append(draining, p.String())
		default:
			serving = append(serving, p.String())
		}
	}
	slices.Sort(serving)
	slices.Sort(draining)
	return serving, draining
}

// report records the reason for which no range serves; nil if one does.
func (n *Node) report(why error) {
	n.mu.Lock()
	before := n.problem
	n.problem = why
	if before == nil {
		n.missing = time.Now()
	}
	n.mu.Unlock()
	n.Report(n.Problem())
	switch {
	case why == nil || before != nil && before.Error() == why.Error():
	case errors.Is(why, errUnread): // at every first start, the object was not read yet
		n.Log.Info("waiting for the Node", log.Err(why))
	default:
		n.Log.Warn("no address range is available", log.Err(why))
	}
}

// complain logs an error, unless the same error was logged last.
func (n *Node) complain(err error) {
	if err.Error() != n.logged {
		n.logged = err.Error()
		n.Log.Error("the Node object was not written, trying again", log.Err(err))
	}
}

// addresses returns the annotation of package podrange that the object should have.
func (n *Node) addresses(o *object) string {
	note := n.Addresses.Note()
	if note.State == "" {
		if said, err := podrange.Parse(o.addresses); err == nil {
			n.Addresses.Adopt(said)
		}
		return o.addresses
	}
	if note.State == podrange.Available && o.addresses == "" {
		return "" // a new Node has never had a shortage
	}
	return note.String()
}

// annotations are the annotations of the object; empty: absent.
type annotations struct{ serving, draining, addresses string }

// write patches the parts of the object that differ from the notes. Every patch contains the object's uid, so that
// another object of the same name is not changed.
func (n *Node) write(ctx context.Context, o *object, notes annotations) error {
	var errs []error
	if notes != (annotations{o.serving, o.draining, o.addresses}) {
		errs = append(errs, n.patch(ctx, types.MergePatchType, "", map[string]any{
			"metadata": map[string]any{"uid": o.uid, "annotations": map[string]any{
				servingAnnotation: orNull(notes.serving), drainingAnnotation: orNull(notes.draining),
				podrange.Annotation: orNull(notes.addresses),
			}},
		}))
	}
	if notes.serving == "" {
		return errors.Join(errs...)
	}
	if o.networkUnavailable {
		now := metav1.Now()
		errs = append(errs, n.patch(ctx, types.StrategicMergePatchType, "status", map[string]any{
			"metadata": map[string]any{"uid": o.uid},
			"status": map[string]any{"conditions": []corev1.NodeCondition{{
				Type: corev1.NodeNetworkUnavailable, Status: corev1.ConditionFalse, Reason: "SluiceHasRanges",
				Message: "sluice-ipam has ranges for pods", LastHeartbeatTime: now, LastTransitionTime: now,
			}}},
		}))
	}
	if o.taint >= 0 {
		errs = append(errs, n.patch(ctx, types.JSONPatchType, "", []map[string]any{
			{"op": "test", "path": "/metadata/resourceVersion", "value": o.version},
			{"op": "remove", "path": fmt.Sprintf("/spec/taints/%d", o.taint)},
		}))
	}
	return errors.Join(errs...)
}

// orNull returns null, which removes an annotation, for an empty text.
func orNull(text string) any {
	if text == "" {
		return nil
	}
	return text
}

func (n *Node) patch(ctx context.Context, kind types.PatchType, subresource string, content any) error {
	body, err := json.Marshal(content)
	if err != nil {
		return err
	}
	r := n.client.Patch(kind).Resource("nodes").Name(n.Name).Timeout(10 * time.Second).Body(body)
	if subresource != "" {
		r = r.SubResource(subresource)
	}
	return r.Do(ctx).Error()
}
