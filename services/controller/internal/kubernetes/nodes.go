// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package kubernetes

import (
	"context"
	"log/slog"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/rest"

	"github.com/sluice-net/sluice/kube"
	"github.com/sluice-net/sluice/model/podrange"
)

// NodeNames takes the names of Nodes as they appear and go.
type NodeNames interface {
	// Upsert says that there is a Node.
	Upsert(name string)
	// Delete says that a Node was deleted.
	Delete(name string)
	// Complete says that all Nodes were named.
	Complete()
	// Failed says why the Nodes are not followed; nil: they are.
	Failed(err error)
}

// NodeNotes takes the notes of Nodes about their addresses.
type NodeNotes interface {
	// Upsert says that there is a Node, and what its annotation podrange.Annotation has; empty: it has none.
	Upsert(name, uid, annotation string)
	// Delete says that a Node was deleted.
	Delete(name string)
}

// NodeRanges takes the podCIDRs of Nodes.
type NodeRanges interface {
	// Upsert says which podCIDRs a Node has.
	Upsert(name string, podCIDRs []string)
	// Delete says that a Node was deleted.
	Delete(name string)
	// Complete says that all Nodes were named.
	Complete()
	// Failed says why the Nodes are not followed; nil: they are.
	Failed(err error)
}

// Nodes follows the Nodes of an API server, and keeps of each its UID, an annotation and its podCIDRs.
type Nodes struct {
	api    *kube.Client
	client *rest.RESTClient // of whole objects, encoded as protobuf
	to     handler
	log    *slog.Logger
}

// NewNodes returns Nodes that tell the others.
func NewNodes(api *kube.Client, n NodeNames, o NodeNotes, r NodeRanges, l *slog.Logger) (*Nodes, error) {
	client, err := api.REST(corev1.SchemeGroupVersion, corev1.AddToScheme)
	if err != nil {
		return nil, err
	}
	return &Nodes{api: api, client: client, to: handler{names: n, notes: o, ranges: r}, log: l}, nil
}

// Run follows the Nodes until ctx ends; it then returns nil.
func (n *Nodes) Run(ctx context.Context) error {
	return kube.Follow(ctx, n.api, kube.Kind[node]{
		Client: n.client, Resource: "nodes", Type: &corev1.Node{}, Trim: trim,
	}, n.to, n.log)
}

// NodeCheck is a nodegc.API.
type NodeCheck struct{ metadata *rest.RESTClient }

// NewNodeCheck returns a NodeCheck of an API server.
func NewNodeCheck(api *kube.Client) (*NodeCheck, error) {
	metadata, err := kube.MetadataClient(api.Config)
	if err != nil {
		return nil, err
	}
	return &NodeCheck{metadata}, nil
}

// Exists implements nodegc.API. It lists, which the account may do anyway, from
// the newest state that the servers have.
func (c *NodeCheck) Exists(ctx context.Context, name string) (bool, error) {
	var list metav1.PartialObjectMetadataList
	err := c.metadata.Get().Resource("nodes").Param("fieldSelector", "metadata.name="+name).Timeout(requestTimeout).
		Do(ctx).Into(&list)
	return len(list.Items) > 0, err
}

// node is what is kept of a Node.
type node struct {
	uid, addresses string
	podCIDRs       []string
}

// trim implements kube.Kind.
func trim(o runtime.Object) node {
	n := o.(*corev1.Node)
	kept := node{uid: string(n.UID), addresses: n.Annotations[podrange.Annotation], podCIDRs: n.Spec.PodCIDRs}
	if len(kept.podCIDRs) == 0 && n.Spec.PodCIDR != "" {
		kept.podCIDRs = []string{n.Spec.PodCIDR}
	}
	return kept
}

// handler implements kube.Handler.
type handler struct {
	names  NodeNames
	notes  NodeNotes
	ranges NodeRanges
}

func (h handler) Upsert(name types.NamespacedName, n node) {
	h.names.Upsert(name.Name)
	h.notes.Upsert(name.Name, n.uid, n.addresses)
	h.ranges.Upsert(name.Name, n.podCIDRs)
}

func (h handler) Delete(name types.NamespacedName) {
	h.names.Delete(name.Name)
	h.notes.Delete(name.Name)
	h.ranges.Delete(name.Name)
}

func (h handler) Complete() {
	h.names.Complete()
	h.ranges.Complete()
}

func (h handler) Failed(err error) {
	h.names.Failed(err)
	h.ranges.Failed(err)
}
