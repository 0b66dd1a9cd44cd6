// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package policy

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net/netip"
	"slices"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/sluice-net/sluice/cmd/sluice/internal/invocation"
	"github.com/sluice-net/sluice/cmd/sluice/internal/manifest"
	"github.com/sluice-net/sluice/cmd/sluice/internal/output"
	"github.com/sluice-net/sluice/cmd/sluice/internal/policykind"
	"github.com/sluice-net/sluice/cmd/sluice/internal/ports"
	"github.com/sluice-net/sluice/cmd/sluice/internal/workload"
	"github.com/sluice-net/sluice/model/identity"
	identityv1 "github.com/sluice-net/sluice/proto/gen/sluice/identity/v1"
	policyv1 "github.com/sluice-net/sluice/proto/gen/sluice/policy/v1"
)

// Exit codes of `policy diff`, as of diff(1).
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
		Short: "Show whose verdicts would change if policies were applied or deleted",
		Long: fmt.Sprintf(`Show which connections of the pods of this node would be evaluated differently if
the policies of files were applied and others deleted. It changes nothing. The
exit code is 0 if no verdict would change, %d if one would, %d if that cannot be
said.`, exitDiffers, exitTrouble),
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
	f.StringVarP(&namespace, "namespace", "n", "", "namespace of what names none (default \"default\")")
	return cmd
}

// difference is one element of what `policy diff` prints.
type difference struct {
	Subject       uint32      `json:"subject"`
	SubjectLabels []string    `json:"subjectLabels"`
	Direction     string      `json:"direction"`
	Peers         []diffPeer  `json:"peers"`
	Ports         []diffPorts `json:"ports"`
}

type diffPeer struct {
	Identity uint32   `json:"identity,omitempty"`
	Labels   []string `json:"labels,omitempty"`
	Prefix   string   `json:"prefix,omitempty"`
	// Addresses is, of an identity that no endpoint of this node has, how many addresses of the cluster have it; unset if
	// that is not known.
	Addresses *int `json:"addresses,omitempty"`
}

type diffPorts struct {
	Ports  []string `json:"ports"`
	Before string   `json:"before"`
	After  string   `json:"after"`
}

func differenceOf(r *policyv1.DiffResponse) difference {
	d := difference{
		Subject: r.GetSubject(), SubjectLabels: workload.LabelTextsInOrder(r.GetSubjectLabels()),
		Direction: output.Enum(r.GetDirection(), "DIRECTION_"),
		Peers:     []diffPeer{}, Ports: []diffPorts{},
	}
	for _, p := range r.GetPeers() {
		d.addPeer(diffPeer{
			Identity: p.GetIdentity(), Labels: workload.LabelTextsInOrder(p.GetLabels()), Prefix: p.GetPrefix(),
		})
	}
	var sets []ports.Intervals
	for _, p := range r.GetPorts() {
		before, after := verdictWord(output.Enum(p.GetBefore(), "ACTION_")), verdictWord(output.Enum(p.GetAfter(), "ACTION_"))
		i := 0
		for i < len(d.Ports) && (d.Ports[i].Before != before || d.Ports[i].After != after) {
			i++
		}
		if i == len(d.Ports) {
			d.Ports = append(d.Ports, diffPorts{Before: before, After: after})
			sets = append(sets, nil)
		}
		// The line goes on behind the last protocol that a packet can have.
		first, last := ports.Point(p.GetFirstProtocol(), p.GetFirstPort()), ports.Point(p.GetLastProtocol(), p.GetLastPort())
		sets[i] = append(sets[i], ports.Interval{First: min(first, ports.LastPoint), Last: min(last, ports.LastPoint)})
	}
	for i := range sets {
		d.Ports[i].Ports = sets[i].Texts()
	}
	return d
}

// addPeer adds a peer that is not there yet. An identity that was named at
// every IPv4 and at every IPv6 address is named once.
func (d *difference) addPeer(p diffPeer) {
	find := func(prefix string) int {
		return slices.IndexFunc(d.Peers, func(q diffPeer) bool { return q.Identity == p.Identity && q.Prefix == prefix })
	}
	other := map[string]string{"0.0.0.0/0": "::/0", "::/0": "0.0.0.0/0"}[p.Prefix]
	i := -1
	if p.Identity != 0 && other != "" {
		i = find(other)
	}
	switch {
	case i >= 0:
		d.Peers[i].Prefix = ""
	case find(p.Prefix) < 0 && (p.Identity == 0 || find("") < 0):
		d.Peers = append(d.Peers, p)
	}
}

// addDifference puts peers for which the same changes together.
func addDifference(all []difference, d difference) []difference {
	i := slices.IndexFunc(all, func(o difference) bool {
		return o.Subject == d.Subject && o.Direction == d.Direction &&
			slices.EqualFunc(o.Ports, d.Ports, func(a, b diffPorts) bool {
				return a.Before == b.Before && a.After == b.After && slices.Equal(a.Ports, b.Ports)
			})
	})
	if i < 0 {
		return append(all, d)
	}
	for _, p := range d.Peers {
		all[i].addPeer(p)
	}
	return all
}

func diff(ctx context.Context, inv *invocation.Invocation, stdin io.Reader, files, remove []string, namespace string,
	allowUnknown, skipOthers bool,
) error {
	if len(files) == 0 && len(remove) == 0 {
		return invocation.Usagef("nothing to compare: want -f FILE, --delete KIND/[NAMESPACE/]NAME, or both")
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
	all := []difference{}
	if err := invocation.Each(ctx, inv, invocation.Policy, client.Diff, req, func(m *policyv1.DiffResponse) {
		all = addDifference(all, differenceOf(m))
	}); err != nil {
		return manifest.InDocuments(err, docs)
	}
	locate(ctx, inv, all)
	if err := inv.Show(all, func(w io.Writer) { differencesTable(w, all) }); err != nil {
		return err
	}
	if len(all) == 0 {
		return warnWithoutSubjects(ctx, inv)
	}
	return invocation.ErrReported
}

// locateTimeout is how long the differences wait for a service that hangs.
const locateTimeout = 3 * time.Second

// locate counts the addresses of identities that the policy service knows none of: it knows those of this node. A node
// that is not registered, or whose service of identities is away, does not know what others have.
func locate(ctx context.Context, inv *invocation.Invocation, all []difference) {
	var unknown []*diffPeer
	for i := range all {
		for j := range all[i].Peers {
			p := &all[i].Peers[j]
			if p.Prefix == "" && identity.Numeric(p.Identity).Scope() == identity.ScopeCluster {
				unknown = append(unknown, p)
			}
		}
	}
	if len(unknown) == 0 {
		return
	}
	ctx, cancel := context.WithTimeout(ctx, min(inv.Timeout, locateTimeout))
	defer cancel()
	s, err := invocation.Ask(ctx, inv, invocation.Identity, identityv1.IdentityServiceClient.GetStatus,
		&identityv1.GetStatusRequest{})
	if err != nil || !s.GetCluster().GetRegistered() || !s.GetStoreConnected() {
		return
	}
	count := map[uint32]int{}
	if err := invocation.Each(ctx, inv, invocation.Cluster, identityv1.ClusterServiceClient.ListIPMappings,
		&identityv1.ListIPMappingsRequest{}, func(m *identityv1.ListIPMappingsResponse) {
			for _, x := range m.GetMappings() {
				count[x.GetIdentity()]++
			}
		}); err != nil {
		return // the differences do not depend on it
	}
	for _, p := range unknown {
		n := count[p.Identity]
		p.Addresses = &n
	}
}

// warnWithoutSubjects says that no difference means nothing, where nothing was
// compared.
func warnWithoutSubjects(ctx context.Context, inv *invocation.Invocation) error {
	s, err := invocation.Ask(ctx, inv, invocation.Policy, client.GetStatus, &policyv1.GetStatusRequest{})
	if err == nil && s.GetSubjects() == 0 {
		fmt.Fprintln(inv.ErrOut, "warning: the policy service knows no pod of this node, so nothing was compared; "+
			"`sluice status` shows whether a datapath is connected")
	}
	return err
}

func differencesTable(w io.Writer, all []difference) {
	if len(all) == 0 {
		fmt.Fprintln(w, "No verdict would change for the pods of this node.")
	}
	for i, d := range all {
		if i == 0 || d.Subject != all[i-1].Subject || d.Direction != all[i-1].Direction {
			if i > 0 {
				fmt.Fprintln(w)
			}
			side := "What %s may receive"
			if d.Direction == "egress" {
				side = "What %s may send"
			}
			fmt.Fprintln(w, output.Printable(fmt.Sprintf(side, workload.IdentityText(d.Subject, d.SubjectLabels))))
		}
		for _, p := range d.Ports {
			fmt.Fprintln(w, output.Printable(fmt.Sprintf("  %s: %s -> %s", strings.Join(p.Ports, ", "), p.Before, p.After)))
		}
		preposition := "from"
		if d.Direction == "egress" {
			preposition = "to"
		}
		for _, line := range peerLines(d.Peers) {
			fmt.Fprintln(w, output.Printable("    "+preposition+" "+line))
		}
	}
}

// maxPlaces is how many addresses of an identity are named to people.
const maxPlaces = 4

// peerLines gives each workload a line, and one to all prefixes and
// one to all reserved identities.
func peerLines(peers []diffPeer) []string {
	var workloads, reserved, blocks []string
	var order []diffPeer
	places := map[uint32][]string{}
	for _, p := range peers {
		switch {
		case p.Identity == 0:
			blocks = append(blocks, p.text())
		case p.Identity <= uint32(identity.MaxReserved) && len(p.Labels) > 0:
			reserved = append(reserved, strings.ReplaceAll(workload.Text(p.Labels), ",", "+"))
		default:
			if _, ok := places[p.Identity]; !ok {
				order = append(order, p)
				places[p.Identity] = nil
			}
			if p.Prefix != "" {
				places[p.Identity] = append(places[p.Identity], placeText(p.Prefix))
			}
		}
	}
	for _, p := range order {
		line, at := workload.IdentityText(p.Identity, p.Labels), places[p.Identity]
		if n := len(at); n > maxPlaces {
			at = append(at[:maxPlaces:maxPlaces], fmt.Sprintf("%d more", n-maxPlaces))
		}
		switch {
		case len(at) > 0:
			line += " at " + strings.Join(at, ", ")
		case p.Addresses == nil:
		case *p.Addresses == 0:
			line += ", which no endpoint has now"
		case *p.Addresses == 1:
			line += " at one address of the cluster"
		default:
			line += fmt.Sprintf(" at %d addresses of the cluster", *p.Addresses)
		}
		workloads = append(workloads, line)
	}
	for _, together := range [][]string{slices.Compact(reserved), blocks} {
		if len(together) > 0 {
			workloads = append(workloads, strings.Join(together, ", "))
		}
	}
	return workloads
}

// placeText is a prefix; of one address, the address.
func placeText(prefix string) string {
	if p, err := netip.ParsePrefix(prefix); err == nil && p.IsSingleIP() {
		return p.Addr().String()
	}
	return prefix
}

// text is a prefix outside.
func (p diffPeer) text() string {
	if p.Prefix != "" {
		return placeText(p.Prefix)
	}
	return "every other address outside"
}
