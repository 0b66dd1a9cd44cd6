// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package kubernetes

import (
	"context"
	"log/slog"
	"net/netip"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/rest"

	"github.com/sluice-net/sluice/kube"
	"github.com/sluice-net/sluice/model/podrange"
	"github.com/sluice-net/sluice/services/controller/internal/lbipam"
)

// NodeNames receives the names of Nodes.
type NodeNames interface {
	// Upsert reports an existing Node.
	Upsert(name string)
	// Delete reports a deleted Node.
	Delete(name string)
	// Complete reports that all existing Nodes have been reported.
	Complete()
	// Failed reports why the Nodes cannot be followed; nil means that they can.
	Failed(err error)
}

// NodeNotes receives the annotations of Nodes about their pod ranges.
type NodeNotes interface {
	// Upsert reports an existing Node and the value of its annotation podrange.Annotation; empty if it has none.
	Upsert(name, uid, annotation string)
	// Delete reports a deleted Node.
	Delete(name string)
}

// NodeRanges receives the podCIDRs of Nodes.
type NodeRanges interface {
	// Upsert reports the podCIDRs of a Node.
	Upsert(name string, podCIDRs []string)
	// Delete reports a deleted Node.
	Delete(name string)
	// Complete reports that all existing Nodes have been reported.
	Complete()
	// Failed reports why the Nodes cannot be followed; nil means that they can.
	Failed(err error)
}

// NodeAddresses receives the addresses of Nodes and of their pods.
type NodeAddresses interface {
	// UpsertNode reports an existing Node.
	UpsertNode(name string, n lbipam.Node)
	// DeleteNode reports a deleted Node.
	DeleteNode(name string)
	// SetListed reports that all existing Nodes have been reported.
	SetListed(kind int, listed bool)
}

// Nodes follows the Nodes of an API server. It keeps the UID, one annotation, the addresses and the podCIDRs of each
// Node.
type Nodes struct {
	api    *kube.Client
	client *rest.RESTClient // reads whole objects, encoded as protobuf
	to     handler
	log    *slog.Logger
}

// NewNodes returns Nodes that report names to n, annotations to o, podCIDRs to r and addresses to a.
func NewNodes(
	api *kube.Client, n NodeNames, o NodeNotes, r NodeRanges, a NodeAddresses, l *slog.Logger,
) (*Nodes, error) {
	client, err := api.REST(corev1.SchemeGroupVersion, corev1.AddToScheme)
	if err != nil {
		return nil, err
	}
	return &Nodes{api: api, client: client, to: handler{names: n, notes: o, ranges: r, addresses: a}, log: l}, nil
}

// Run follows the Nodes until ctx ends; it then returns nil.
func (n *Nodes) Run(ctx context.Context) error {
	return kube.Follow(ctx, n.api, kube.Kind[node]{
		Client: n.client, Resource: "nodes", Type: &corev1.Node{}, Trim: trim,
	}, n.to, n.log)
}

// NodeCheck implements nodegc.API.
type NodeCheck struct{ metadata *rest.RESTClient }

// NewNodeCheck returns a NodeCheck of an API server.
func NewNodeCheck(api *kube.Client) (*NodeCheck, error) {
	metadata, err := kube.MetadataClient(api.Config)
	if err != nil {
		return nil, err
	}
	return &NodeCheck{metadata}, nil
}

// Exists implements nodegc.API. It lists Nodes by name, because the service account may list Nodes but need not be
// allowed to get one. The list has the newest state of the API server's store.
func (c *NodeCheck) Exists(ctx context.Context, name string) (bool, error) {
	var list metav1.PartialObjectMetadataList
	err := c.metadata.Get().Resource("nodes").Param("fieldSelector", "metadata.name="+name).Timeout(requestTimeout).
		Do(ctx).Into(&list)
	return len(list.Items) > 0, err
}

// node is the part of a Node that is kept.
type node struct {
	uid, addresses string
	podCIDRs       []string
	parsed         lbipam.Node
}

// trim implements kube.Kind.Trim.
func trim(o runtime.Object) node {
	n := o.(*corev1.Node)
	kept := node{uid: string(n.UID), addresses: n.Annotations[podrange.Annotation], podCIDRs: n.Spec.PodCIDRs}
	if len(kept.podCIDRs) == 0 && n.Spec.PodCIDR != "" {
		kept.podCIDRs = []string{n.Spec.PodCIDR}
	}
	for _, a := range n.Status.Addresses {
		if parsed, err := netip.ParseAddr(a.Address); err == nil { // otherwise it is a name
			kept.parsed.Addresses = append(kept.parsed.Addresses, parsed)
		}
	}
	for _, text := range kept.podCIDRs {
		if p, err := netip.ParsePrefix(text); err == nil {
			kept.parsed.Pods = append(kept.parsed.Pods, p)
		}
	}
	return kept
}

// handler implements kube.Handler.
type handler struct {
	names     NodeNames
	notes     NodeNotes
	ranges    NodeRanges
	addresses NodeAddresses
}

func (h handler) Upsert(name types.NamespacedName, n node) {
	h.names.Upsert(name.Name)
	h.notes.Upsert(name.Name, n.uid, n.addresses)
	h.ranges.Upsert(name.Name, n.podCIDRs)
	h.addresses.UpsertNode(name.Name, n.parsed)
}

func (h handler) Delete(name types.NamespacedName) {
	h.names.Delete(name.Name)
	h.notes.Delete(name.Name)
	h.ranges.Delete(name.Name)
	h.addresses.DeleteNode(name.Name)
}

func (h handler) Complete() {
	h.names.Complete()
	h.ranges.Complete()
	h.addresses.SetListed(lbipam.Nodes, true)
}

func (h handler) Failed(err error) {
	h.names.Failed(err)
	h.ranges.Failed(err)
}
