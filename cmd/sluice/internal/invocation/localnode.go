// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package invocation

import (
	"context"
	"fmt"
	"io"
	"time"

	"github.com/sluice-net/sluice/cmd/sluice/internal/output"
	identityv1 "github.com/sluice-net/sluice/proto/gen/sluice/identity/v1"
)

// localNodeTimeout limits the wait for sluice-identity, whose answer is optional.
const localNodeTimeout = time.Second

// LocalNode describes this node, for the notes of commands that change only one node of a cluster.
type LocalNode struct {
	Name   string
	Others uint32 // other nodes of the cluster
}

// AskLocalNode asks sluice-identity for the node. If it does not answer, the zero value has no other nodes.
func AskLocalNode(ctx context.Context, inv *Invocation) LocalNode {
	ctx, cancel := context.WithTimeout(ctx, min(inv.Timeout, localNodeTimeout))
	defer cancel()
	r, err := Ask(ctx, inv, Identity, identityv1.IdentityServiceClient.GetStatus, &identityv1.GetStatusRequest{})
	if n := r.GetCluster().GetNodes(); err == nil && n > 1 {
		return LocalNode{Name: r.GetNodeName(), Others: n - 1}
	}
	return LocalNode{}
}

// BeginAskLocalNode asks as AskLocalNode does, in the background. The returned function waits for the answer.
func BeginAskLocalNode(ctx context.Context, inv *Invocation) func() LocalNode {
	answer := make(chan LocalNode, 1)
	go func() { answer <- AskLocalNode(ctx, inv) }()
	return func() LocalNode { return <-answer }
}

// WriteOnly writes the note that a change applies only to this node, if the cluster has other nodes.
func (n LocalNode) WriteOnly(w io.Writer) {
	if only := n.Only(); only != "" {
		fmt.Fprintln(w, output.Printable("The change applies only to "+only+"."))
	}
}

// Only returns "this node (NAME), not N other nodes of the cluster"; empty if there are no other nodes.
func (n LocalNode) Only() string {
	if n.Others == 0 {
		return ""
	}
	return fmt.Sprintf("this node (%s), not %s of the cluster", n.Name,
		output.Plural(n.Others, "other node", "other nodes"))
}
