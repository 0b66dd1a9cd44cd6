// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package policy

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"net/netip"
	"slices"
	"strings"
	"time"

	"github.com/spf13/cobra"
	"google.golang.org/protobuf/proto"

	"github.com/sluice-net/sluice/cmd/sluice/internal/invocation"
	"github.com/sluice-net/sluice/cmd/sluice/internal/manifest"
	"github.com/sluice-net/sluice/cmd/sluice/internal/output"
	"github.com/sluice-net/sluice/cmd/sluice/internal/output/message"
	"github.com/sluice-net/sluice/cmd/sluice/internal/policykind"
	"github.com/sluice-net/sluice/cmd/sluice/internal/ports"
	"github.com/sluice-net/sluice/cmd/sluice/internal/workload"
	"github.com/sluice-net/sluice/model/identity"
	identityv1 "github.com/sluice-net/sluice/proto/gen/sluice/identity/v1"
	netv1 "github.com/sluice-net/sluice/proto/gen/sluice/net/v1"
	policyv1 "github.com/sluice-net/sluice/proto/gen/sluice/policy/v1"
)

// Exit codes of `policy diff`, the same as diff(1).
const (
	exitDiffers = invocation.ExitFailed
	exitTrouble = 2
)

func diffCommand(inv *invocation.Invocation) *cobra.Command {
	var (
		files, remove []string
		namespace     string
		allowUnknown  bool
		skipOthers    bool
	)
	cmd := &cobra.Command{
		Use:   "diff [-f FILE] [--delete KIND/[NAMESPACE/]NAME]",
		Short: "Show which verdicts would change if policies were applied or deleted",
		Long: fmt.Sprintf(`Show which connections of the pods of this node would get another verdict if the policies
in files were applied and others deleted. Nothing is changed. The exit code is 0 if no
verdict would change, %d if one would, %d on errors.`, exitDiffers, exitTrouble),
		Example: `  sluice policy diff -f web.yaml
  sluice policy diff --delete NetworkPolicy/shop/web`,
		Args: onlyFiles,
		RunE: func(cmd *cobra.Command, _ []string) error {
			err := diff(cmd.Context(), inv, cmd.InOrStdin(), files, remove, namespace, allowUnknown, skipOthers)
			if err != nil && !errors.Is(err, invocation.ErrReported) {
				return &invocation.ExitError{Code: exitTrouble, Err: err}
			}
			return err
		},
	}
	manifestFlags(cmd, &allowUnknown, &skipOthers)
	f := cmd.Flags()
	f.StringArrayVarP(&files, "filename", "f", nil,
		"file, directory or - for standard input with policies to apply; may be repeated")
	f.StringArrayVar(&remove, "delete", nil, "policy to delete, KIND/[NAMESPACE/]NAME; may be repeated")
	f.StringVarP(&namespace, "namespace", "n", "", "namespace of objects without one (default \"default\")")
	return cmd
}

// otherFamily maps the prefix of all IPv4 addresses to the prefix of all IPv6 addresses, and back.
var otherFamily = map[string]string{"0.0.0.0/0": "::/0", "::/0": "0.0.0.0/0"}

// addPeer adds a peer unless it is in the list. An identity with all IPv4 and all IPv6 addresses becomes one entry
// without a prefix.
func addPeer(all []*policyv1.DiffPeer, p *policyv1.DiffPeer) []*policyv1.DiffPeer {
	find := func(prefix string) int {
		return slices.IndexFunc(all, func(q *policyv1.DiffPeer) bool {
			return q.GetIdentity() == p.GetIdentity() && q.GetPrefix() == prefix
		})
	}
	i := -1
	if other := otherFamily[p.GetPrefix()]; p.GetIdentity() != 0 && other != "" {
		i = find(other)
	}
	switch {
	case i >= 0:
		all[i].Prefix = ""
	case find(p.GetPrefix()) < 0 && (p.GetIdentity() == 0 || find("") < 0):
		return append(all, p)
	}
	return all
}

// addDifference merges peers with the same changes.
func addDifference(all []*policyv1.DiffResponse, d *policyv1.DiffResponse) []*policyv1.DiffResponse {
	peers := d.GetPeers()
	i := slices.IndexFunc(all, func(o *policyv1.DiffResponse) bool {
		return o.GetSubject() == d.GetSubject() && o.GetDirection() == d.GetDirection() &&
			slices.EqualFunc(o.GetPorts(), d.GetPorts(), func(a, b *policyv1.DiffPorts) bool { return proto.Equal(a, b) })
	})
	if i < 0 {
		d.Peers = nil
		all, i = append(all, d), len(all)
	}
	for _, p := range peers {
		all[i].Peers = addPeer(all[i].Peers, p)
	}
	return all
}

func diff(ctx context.Context, inv *invocation.Invocation, stdin io.Reader, files, remove []string, namespace string,
	allowUnknown, skipOthers bool,
) error {
	if len(files) == 0 && len(remove) == 0 {
		return invocation.Usagef("nothing to compare: want -f FILE, --delete KIND/[NAMESPACE/]NAME or both")
	}
	req := &policyv1.DiffRequest{DefaultNamespace: namespace, AllowUnknownFields: allowUnknown}
	var docs []manifest.Document
	if len(files) > 0 {
		var err error
		if docs, err = readPolicies(inv, files, stdin, skipOthers); err == nil {
			err = manifest.Fits(docs)
		}
		if err != nil {
			return alsoRefused(ctx, inv, err, docs, namespace, allowUnknown)
		}
		req.Manifests = manifest.Join(docs)
	}
	for _, text := range remove {
		keys, err := policykind.KeysNamed(strings.Fields(text), namespace)
		if err != nil {
			return invocation.Usagef("--delete: %w", err)
		}
		req.Delete = append(req.Delete, keys...)
	}
	for _, key := range req.GetDelete() {
		found, err := list(ctx, inv, &policyv1.ListPoliciesRequest{
			Kind: key.GetKind(), Namespace: key.GetNamespace(), Name: key.GetName(),
		})
		if err == nil && len(found) == 0 {
			fmt.Fprintln(inv.ErrOut, output.Printable("warning: --delete: this node has no "+policykind.KeyText(key)))
		}
	}
	var all []*policyv1.DiffResponse
	if err := invocation.Each(ctx, inv, invocation.Policy, client.Diff, req, func(m *policyv1.DiffResponse) {
		all = addDifference(all, m)
	}); err != nil {
		return manifest.InDocuments(err, docs)
	}
	counts := locate(ctx, inv, all)
	items := make([]message.Object, len(all))
	for i, d := range all {
		peers := make([]message.Object, len(d.GetPeers()))
		for j, p := range d.GetPeers() {
			count := message.Fact{Key: "addressCount"}
			if n, ok := counts.of(p); ok {
				count.Value = n
			}
			peers[j] = message.Of(p, count)
		}
		items[i] = message.Of(d, message.Fact{Key: "peers", Value: peers})
	}
	if err := inv.Show(items, func(w io.Writer) {
		differencesTable(w, all, counts)
		if only := invocation.AskLocalNode(ctx, inv).Only(); only != "" {
			fmt.Fprintln(w, "\n"+output.Printable("Compared: "+only+"."))
		}
	}); err != nil {
		return err
	}
	if len(all) == 0 {
		return warnWithoutSubjects(ctx, inv)
	}
	return invocation.ErrReported
}

// addressCounts contains the number of addresses of each identity in the cluster. It is nil if the numbers are unknown.
type addressCounts map[uint32]int

// of returns the number of addresses of a peer that has no endpoint on this node.
func (c addressCounts) of(p *policyv1.DiffPeer) (n int, known bool) {
	return c[p.GetIdentity()], c != nil && unlocated(p)
}

// unlocated reports whether the policy service knows no address of the peer.
func unlocated(p *policyv1.DiffPeer) bool {
	return p.GetPrefix() == "" && identity.Numeric(p.GetIdentity()).Scope() == identity.ScopeCluster
}

// locateTimeout limits the wait for sluice-identity, which may hang.
const locateTimeout = 3 * time.Second

// locate counts the cluster's addresses of identities for which the policy service has no address, because it knows
// only the addresses of this node. It returns nil if sluice-identity is not available or the node is not registered.
func locate(ctx context.Context, inv *invocation.Invocation, all []*policyv1.DiffResponse) addressCounts {
	if !slices.ContainsFunc(all, func(d *policyv1.DiffResponse) bool {
		return slices.ContainsFunc(d.GetPeers(), unlocated)
	}) {
		return nil
	}
	ctx, cancel := context.WithTimeout(ctx, min(inv.Timeout, locateTimeout))
	defer cancel()
	s, err := invocation.Ask(ctx, inv, invocation.Identity, identityv1.IdentityServiceClient.GetStatus,
		&identityv1.GetStatusRequest{})
	if err != nil || !s.GetCluster().GetRegistered() || !s.GetStoreConnected() {
		return nil
	}
	counts := addressCounts{}
	if err := invocation.Each(ctx, inv, invocation.Cluster, identityv1.ClusterServiceClient.ListIPMappings,
		&identityv1.ListIPMappingsRequest{}, func(m *identityv1.ListIPMappingsResponse) {
			for _, x := range m.GetMappings() {
				counts[x.GetIdentity()]++
			}
		}); err != nil {
		return nil // the counts are optional
	}
	return counts
}

// warnWithoutSubjects prints a warning if the policy service knows no pods, because nothing was compared.
func warnWithoutSubjects(ctx context.Context, inv *invocation.Invocation) error {
	s, err := invocation.Ask(ctx, inv, invocation.Policy, client.GetStatus, &policyv1.GetStatusRequest{})
	if err == nil && s.GetSubjects() == 0 {
		fmt.Fprintln(inv.ErrOut, "warning: the policy service knows no pod of this node, so nothing was compared; "+
			"`sluice status` shows whether a datapath is connected")
	}
	return err
}

func differencesTable(w io.Writer, all []*policyv1.DiffResponse, counts addressCounts) {
	if len(all) == 0 {
		fmt.Fprintln(w, "No verdict would change for the pods of this node.")
	}
	for i, d := range all {
		side, preposition := "What %s may receive", "from"
		if d.GetDirection() == netv1.Direction_DIRECTION_EGRESS {
			side, preposition = "What %s may send", "to"
		}
		if i == 0 || d.GetSubject() != all[i-1].GetSubject() || d.GetDirection() != all[i-1].GetDirection() {
			if i > 0 {
				fmt.Fprintln(w)
			}
			fmt.Fprintln(w, output.Printable(fmt.Sprintf(side, workload.IdentityText(d.GetSubject(),
				workload.LabelTextsInOrder(d.GetSubjectLabels())))))
		}
		for _, line := range portLines(d.GetPorts()) {
			fmt.Fprintln(w, output.Printable("  "+line))
		}
		for _, line := range peerLines(d.GetPeers(), counts) {
			fmt.Fprintln(w, output.Printable("    "+preposition+" "+line))
		}
	}
}

// portLines returns one line per change of verdict with its ports.
func portLines(all []*policyv1.DiffPorts) (lines []string) {
	var changes []string
	sets := map[string]ports.Intervals{}
	for _, p := range all {
		change := verdictWord(p.GetBefore()) + " -> " + verdictWord(p.GetAfter())
		if sets[change] == nil {
			changes = append(changes, change)
		}
		// The range continues beyond the last protocol number that a packet can have.
		first, last := ports.Point(p.GetFirstProtocol(), p.GetFirstPort()), ports.Point(p.GetLastProtocol(), p.GetLastPort())
		sets[change] = append(sets[change],
			ports.Interval{First: min(first, ports.LastPoint), Last: min(last, ports.LastPoint)})
	}
	for _, change := range changes {
		lines = append(lines, strings.Join(sets[change].Texts(), ", ")+": "+change)
	}
	return lines
}

// maxPlaces limits the addresses of an identity in tables.
const maxPlaces = 4

// peerLines returns one line for each workload, one line for all prefixes, and one line for all reserved identities.
func peerLines(peers []*policyv1.DiffPeer, counts addressCounts) []string {
	var workloads, reserved, blocks []string
	var order []*policyv1.DiffPeer
	places := map[uint32][]string{}
	for _, p := range peers {
		id := p.GetIdentity()
		switch {
		case id == 0:
			blocks = append(blocks, cmp.Or(placeText(p.GetPrefix()), "every other address outside"))
		case id <= uint32(identity.MaxReserved) && len(p.GetLabels()) > 0:
			text := workload.Text(workload.LabelTextsInOrder(p.GetLabels()))
			reserved = append(reserved, strings.ReplaceAll(text, ",", "+"))
		default:
			if _, ok := places[id]; !ok {
				order = append(order, p)
				places[id] = nil
			}
			if p.GetPrefix() != "" {
				places[id] = append(places[id], placeText(p.GetPrefix()))
			}
		}
	}
	for _, p := range order {
		line := workload.IdentityText(p.GetIdentity(), workload.LabelTextsInOrder(p.GetLabels()))
		at := places[p.GetIdentity()]
		if n := len(at); n > maxPlaces {
			at = append(at[:maxPlaces:maxPlaces], fmt.Sprintf("%d more", n-maxPlaces))
		}
		switch n, known := counts.of(p); {
		case len(at) > 0:
			line += " at " + strings.Join(at, ", ")
		case !known:
		case n == 0:
			line += ", which no endpoint has at present"
		case n == 1:
			line += " at one address of the cluster"
		default:
			line += fmt.Sprintf(" at %d addresses of the cluster", n)
		}
		workloads = append(workloads, line)
	}
	for _, together := range [][]string{shortReserved(slices.Compact(reserved)), blocks} {
		if len(together) > 0 {
			workloads = append(workloads, strings.Join(together, ", "))
		}
	}
	return workloads
}

// usualReserved are the reserved identities that are always listed by name.
var usualReserved = []string{
	identity.NameHost, identity.NameRemoteNode, identity.NameWorld, identity.NameWorldIPv4, identity.NameWorldIPv6,
}

// shortReserved replaces the unusual reserved identities by one text, if listed contains all of them.
func shortReserved(listed []string) []string {
	var unusual []string
	for _, r := range identity.Reserved() {
		if labels := r.Labels.All(); len(labels) == 1 && !slices.Contains(usualReserved, labels[0].Key) {
			unusual = append(unusual, labels[0].Source+":"+labels[0].Key)
		}
	}
	others := slices.DeleteFunc(slices.Clone(listed), func(l string) bool { return slices.Contains(unusual, l) })
	if len(listed)-len(others) < len(unusual) {
		return listed
	}
	return append(others, "all reserved identities other than host, remote-node and world")
}

// placeText returns the prefix, or the address if the prefix has only one.
func placeText(prefix string) string {
	if p, err := netip.ParsePrefix(prefix); err == nil && p.IsSingleIP() {
		return p.Addr().String()
	}
	return prefix
}
