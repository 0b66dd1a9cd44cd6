// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

// Package status asks every service and says whether a container could be connected now.
package status

import (
	"cmp"
	"context"
	"fmt"
	"io"
	"slices"
	"strings"
	"time"

	"github.com/spf13/cobra"
	"golang.org/x/sync/errgroup"

	"github.com/sluice-net/sluice/cmd/sluice/internal/invocation"
	"github.com/sluice-net/sluice/cmd/sluice/internal/output"
	"github.com/sluice-net/sluice/cmd/sluice/internal/output/message"
	datapathv1 "github.com/sluice-net/sluice/proto/gen/sluice/datapath/v1"
	ipamv1 "github.com/sluice-net/sluice/proto/gen/sluice/ipam/v1"
)

// Command is `status`.
func Command(inv *invocation.Invocation) *cobra.Command {
	var watch bool
	var wait waiting
	cmd := &cobra.Command{
		Use:   "status",
		Short: "Show whether every service answers and a container could be connected",
		Long: fmt.Sprintf(`Show whether every service answers and a container could be connected now, also
one with labels that no container of this node has. The exit code is %d if not,
and if anything else is not as it should be: then there are warnings. Lines that
begin with Meanwhile say what works while a service is away, and what to do.`, invocation.ExitNotReady),
		Args: invocation.Args(0, ""),
		RunE: func(cmd *cobra.Command, _ []string) error {
			switch {
			case watch && wait.limit > 0:
				return invocation.Usagef("--watch and --wait exclude each other")
			case watch:
				return follow(cmd.Context(), inv)
			case wait.limit > 0:
				return await(cmd.Context(), inv, wait.limit)
			}
			return once(cmd.Context(), inv)
		},
	}
	cmd.Flags().BoolVar(&watch, "watch", false,
		"go on, and show what changes: on a terminal the whole status, else one line for each change")
	wait.flag(cmd)
	return cmd
}

// Node is what `status -o json` prints.
type Node struct {
	Ready    bool     `json:"ready"`         // an ADD with a new label set works
	Known    bool     `json:"readyForKnown"` // one with a label set that this node has does
	Problems []string `json:"problems"`
	Warnings []string `json:"warnings"`
	// Meanwhile says what works without the services that are away, and what to do.
	Meanwhile []string                    `json:"meanwhile"`
	Services  []serviceStatus             `json:"services"`
	Datapath  *datapathStatus             `json:"datapath,omitempty"`
	Identity  *identityStatus             `json:"identity,omitempty"`
	Pools     message.Items[*ipamv1.Pool] `json:"pools,omitempty"`
	Policy    *policyStatus               `json:"policy,omitempty"`
	Cluster   *clusterStatus              `json:"cluster,omitempty"`

	LoadBalancer *loadBalancerStatus `json:"loadBalancer,omitempty"`

	poolProblems []string // of ipam, that keep no container from being connected
}

type serviceStatus struct {
	Name    string     `json:"name"`
	Serving bool       `json:"serving"`
	Error   string     `json:"error,omitempty"`
	Version string     `json:"version,omitempty"`
	Started *time.Time `json:"startTime,omitempty"`
	denied  bool       // the caller may not open the socket
	away    bool       // it did not answer at all
	known   bool       // Error is about label sets that this node does not have
	node    string     // that its settings name; empty: none
	nodeKey string     // of that setting
}

type datapathStatus struct {
	AddReady         bool                                `json:"addReady"`
	KnownAddReady    bool                                `json:"knownAddReady"`
	PolicyMode       string                              `json:"policyMode"`
	Kernel           string                              `json:"kernel"`
	PodCIDRs         []string                            `json:"podCidrs"`
	NodeAddresses    []string                            `json:"nodeAddresses"`
	Endpoints        map[string]uint32                   `json:"endpoints"`
	PendingReleases  uint32                              `json:"pendingReleases"`
	AttachmentRepair uint64                              `json:"attachmentRepairs"`
	DeviceRepairs    uint64                              `json:"deviceRepairs"`
	NodeRepairs      uint64                              `json:"nodeRepairs"`
	EventsLost       uint64                              `json:"eventsLost"`
	Packets          []packets                           `json:"packets"`
	PolicyRevision   uint64                              `json:"policyRevision"`
	PolicyRefusals   []string                            `json:"policyRefusals"`
	Warnings         []string                            `json:"warnings"`
	Connections      *connectionCounts                   `json:"connections,omitempty"`
	Maps             message.Items[*datapathv1.MapUsage] `json:"maps"`
	IdentityStream   *identityStream                     `json:"identityStream,omitempty"`
	NodeProbes       *nodeProbes                         `json:"nodeProbes,omitempty"`
	PodRouting       *podRouting                         `json:"podRouting,omitempty"`
	Frontends        *frontendStream                     `json:"frontendStream,omitempty"` // nil: it translates no service
}

// identityStream is how endpoints change their identity.
type identityStream struct {
	Complete bool   `json:"complete"` // everything that identity wants was heard
	Error    string `json:"error,omitempty"`
	Changed  uint64 `json:"changed"`
	Pending  uint32 `json:"pending"`
}

type connectionCounts struct {
	Live     uint64 `json:"live"`
	Created  uint64 `json:"created"`
	Revoked  uint64 `json:"revoked"`
	Expired  uint64 `json:"expired"`
	Evicted  uint64 `json:"evicted"`
	PickedUp uint64 `json:"pickedUp"`
}

// policyStatus is what the policy service says of itself.
type policyStatus struct {
	Revision          uint64             `json:"revision"`
	Policies          uint32             `json:"policies"`
	Refused           uint32             `json:"refused"`
	Identities        uint32             `json:"identities"`
	WaitingIdentities uint32             `json:"waitingIdentities"`
	Subjects          uint32             `json:"subjects"`
	Tables            uint32             `json:"tables"`
	Sources           []policySource     `json:"sources"`
	Subscribers       []policySubscriber `json:"subscribers"`
	Unsupported       uint32             `json:"policiesWithUnsupportedFields"`
	WaitingFor        []string           `json:"waitingFor,omitempty"`       // why no new endpoint gets its policies
	Skipped           []string           `json:"skippedDocuments,omitempty"` // of files, which are no policies

	problems []string // as the service words them
}

type policySource struct {
	Name     string `json:"name"`
	Manager  string `json:"manager,omitempty"`
	Synced   bool   `json:"synced"`
	Error    string `json:"error,omitempty"`
	Policies uint32 `json:"policies"`
}

type policySubscriber struct {
	Name      string   `json:"name"`
	Connected bool     `json:"connected"`
	Enforces  bool     `json:"enforces"` // else it only watches
	Revision  uint64   `json:"revision"`
	Behind    uint64   `json:"behind"`
	Refusals  []string `json:"refusals,omitempty"`
}

type packets struct {
	Reason    string `json:"reason"`
	Direction string `json:"direction"`
	Dropped   bool   `json:"dropped"`
	Packets   uint64 `json:"packets"`
	Bytes     uint64 `json:"bytes"`
}

type identityStatus struct {
	Node          string   `json:"node"`
	StoreReached  bool     `json:"storeConnected"`
	StoreError    string   `json:"storeError,omitempty"`
	Cluster       uint32   `json:"clusterIdentities"`
	Held          uint32   `json:"heldIdentities"`
	PendingWrites uint32   `json:"pendingStoreWrites"`
	TopLabelKeys  []string `json:"topLabelKeys,omitempty"`

	problems []string // as the service words them, but for those of etcd
}

// clusterStatus is this node among the others.
type clusterStatus struct {
	Registered       bool   `json:"registered"` // etcd has what this node says of itself
	Nodes            uint32 `json:"nodes"`      // that are registered
	Mappings         uint32 `json:"mappings"`   // addresses of other nodes
	RefusedMappings  uint32 `json:"refusedMappings"`
	RefusedRanges    uint32 `json:"refusedRanges"` // of this node
	Pending          uint32 `json:"pendingPublications"`
	PublicationError string `json:"publicationError,omitempty"`
}

// once shows the status.
func once(ctx context.Context, inv *invocation.Invocation) error {
	s, err := look(ctx, inv)
	if err != nil {
		return err
	}
	if err := inv.Show(s, s.table); err != nil {
		return err
	}
	if !s.Ready || len(s.Warnings) > 0 {
		return invocation.ErrNotReady
	}
	return nil
}

// look asks every service.
func look(ctx context.Context, inv *invocation.Invocation) (*Node, error) {
	ctx, cancel := context.WithTimeout(ctx, inv.Timeout)
	defer cancel()
	s := &Node{Problems: []string{}, Meanwhile: []string{}, Services: []serviceStatus{
		{Name: "identity"},
		{Name: "ipam"},
		{Name: "policy"},
		{Name: "loadbalancer"},
		{Name: "datapath"},
	}}
	var wg errgroup.Group
	for i := range s.Services {
		service := &s.Services[i]
		wg.Go(func() error { return ask(ctx, inv, service, s) })
	}
	if err := wg.Wait(); err != nil {
		return nil, err
	}
	s.dropUnused()
	s.judge()
	s.Warnings = s.warnings()
	if hint := inv.OtherNodes(); hint != "" && !slices.ContainsFunc(s.Services,
		func(service serviceStatus) bool { return service.Serving }) {
		s.Warnings = append(s.Warnings, strings.TrimSpace(hint))
	}
	if hint := accessHint(s.Services); hint != "" {
		s.Warnings = append(s.Warnings, hint)
	}
	s.Meanwhile = s.meanwhile(inv)
	return s, nil
}

// judge says for which containers an ADD works, and why for no others.
func (s *Node) judge() {
	s.Problems = append(s.Problems, exhausted(s.Pools)...)
	if b := s.LoadBalancer; b != nil && b.SystemRefused != "" {
		// A container would start without the cluster's DNS or API server.
		s.Problems = append(s.Problems, "sluice-loadbalancer: "+b.SystemRefused)
	}
	s.Known = len(s.Problems) == 0
	// While identity or policy are away, the datapath knows what it needs of them for
	// the label sets of this node.
	stands := s.Datapath != nil && s.Datapath.KnownAddReady
	for _, service := range s.Services {
		switch {
		case service.Name == "loadbalancer":
			// Containers are connected without it: the kernel has the services.
		case service.Error != "":
			s.Problems = append(s.Problems, "sluice-"+service.Name+": "+service.Error)
			s.Known = s.Known && (service.known || service.away && stands && service.standsIn())
		case !service.Serving:
			s.Problems = append(s.Problems, "sluice-"+service.Name+" is not ready")
			s.Known = s.Known && stands && service.standsIn()
		}
	}
	s.Ready = len(s.Problems) == 0
}

// standsIn says that the datapath connects containers with labels that this node has
// without the service.
func (s *serviceStatus) standsIn() bool { return s.Name == "identity" || s.Name == "policy" }

// readyText says for which containers an ADD works.
func (s *Node) readyText() string {
	switch {
	case s.Ready:
		return "yes"
	case s.Known:
		return "only for label sets that this node has"
	}
	return "no"
}

// accessHint says who may ask, if a socket could not be opened for want of rights.
func accessHint(services []serviceStatus) string {
	if slices.ContainsFunc(services, func(service serviceStatus) bool { return service.denied }) {
		return invocation.WhoMay
	}
	return ""
}

// dropUnused leaves out services that do not answer, and that the datapath does not
// use.
func (s *Node) dropUnused() {
	if s.Datapath == nil {
		return
	}
	s.Services = slices.DeleteFunc(s.Services, func(service serviceStatus) bool {
		unused := service.Name == "policy" && s.Datapath.PolicyMode == "none" ||
			service.Name == "loadbalancer" && s.translatesNone()
		return unused && service.Error != "" && service.Version == ""
	})
}

// exhausted names the families of which no pool has an address left. Resting
// in quarantine come back by themselves, but not for a container that wants one now.
func exhausted(pools []*ipamv1.Pool) []string {
	free, full := map[string]bool{}, map[string][]string{}
	for _, p := range pools {
		if p.GetState() == ipamv1.RangeState_RANGE_STATE_DRAINING {
			continue
		}
		family := "IPv4"
		if strings.Contains(p.GetPrefix(), ":") {
			family = "IPv6"
		}
		free[family] = free[family] || p.GetFreeCount() > 0
		full[family] = append(full[family], fmt.Sprintf("%s: %d confirmed, %d leased, %d in quarantine", p.GetPrefix(),
			p.GetConfirmedCount(), p.GetLeasedCount(), p.GetQuarantinedCount()))
	}
	var problems []string
	for _, family := range []string{"IPv4", "IPv6"} {
		if len(full[family]) > 0 && !free[family] {
			problems = append(problems, fmt.Sprintf("sluice-ipam: no %s address is free (%s)", family,
				strings.Join(full[family], "; ")))
		}
	}
	return problems
}

// translatesNone says that the datapath is set to leave services to others.
func (s *Node) translatesNone() bool { return s.Datapath != nil && s.Datapath.Frontends == nil }

// warnings is what is wrong and keeps no container from being connected.
func (s *Node) warnings() []string {
	all := []string{}
	if i := s.Identity; i != nil {
		for _, problem := range i.problems {
			all = append(all, "sluice-identity: "+problem)
		}
	}
	for _, problem := range s.poolProblems {
		all = append(all, "sluice-ipam: "+problem)
	}
	if c := s.Cluster; c != nil {
		if !c.Registered && s.Identity.StoreReached {
			all = append(all, "sluice-identity: this node is not registered: other nodes do not know the addresses of its "+
				"containers; sluice-ipam registers it, if its setting identity is there")
		}
		if c.RefusedMappings > 0 {
			all = append(all, fmt.Sprintf("sluice-identity: %d addresses that other nodes wrote do not count; "+
				"`sluice node list` names the nodes, `sluice ip get` says why of an address", c.RefusedMappings))
		}
		if c.PublicationError != "" && s.Identity.StoreReached {
			all = append(all, "sluice-identity: what this node says does not reach the cluster: "+c.PublicationError)
		}
	}
	if p := s.Policy; p != nil {
		for _, problem := range p.problems {
			all = append(all, "sluice-policy: "+problem)
		}
		if p.Refused > 0 && len(p.problems) == 0 {
			all = append(all, fmt.Sprintf("sluice-policy: %d policies or files were refused; see `sluice policy list --refused`",
				p.Refused))
		}
		if p.Unsupported > 0 {
			all = append(all, fmt.Sprintf("sluice-policy: policies with fields that Sluice does not support: %d; `sluice "+
				"policy list` names them", p.Unsupported))
		}
		for _, source := range p.Sources {
			switch {
			case source.Error != "":
				all = append(all, "sluice-policy: source "+source.Name+": "+source.Error)
			case !source.Synced:
				all = append(all, "sluice-policy: source "+source.Name+" is not complete yet")
			}
		}
	}
	if p := s.Policy; p != nil && p.WaitingIdentities > 0 {
		all = append(all,
			fmt.Sprintf("sluice-policy: %d identities are unknown to a table that has no room", p.WaitingIdentities))
	}
	if b := s.LoadBalancer; b != nil {
		all = append(all, b.warnings(s.translatesNone())...)
	}
	for _, service := range s.Services {
		if s.Identity != nil && service.node != "" && s.Identity.Node != "" && service.node != s.Identity.Node {
			all = append(all, fmt.Sprintf("sluice-%s: the setting %s is %q, and sluice-identity has this node as %q: make the "+
				"two equal", service.Name, service.nodeKey, service.node, s.Identity.Node))
		}
		switch {
		case service.Name != "loadbalancer":
		case service.Error != "":
			all = append(all, "sluice-loadbalancer: services stay as they are: "+service.Error)
		case !service.Serving:
			all = append(all, "sluice-loadbalancer is not ready: services stay as they are")
		}
	}
	if d := s.Datapath; d != nil {
		for _, state := range []string{"waiting-for-identity", "waiting-for-policy", "restoring"} {
			if n := d.Endpoints[state]; n > 0 {
				all = append(all, fmt.Sprintf("sluice-datapath: %d endpoints are %s", n, state))
			}
		}
		for _, refusal := range d.PolicyRefusals {
			all = append(all, "sluice-datapath: not enforced: "+refusal)
		}
		for _, warning := range d.Warnings {
			all = append(all, "sluice-datapath: "+warning)
		}
		all = append(all, d.Frontends.warnings(s.LoadBalancer)...)
		if i := d.IdentityStream; i != nil && !i.Complete {
			all = append(all, "sluice-datapath: endpoints keep their identities when labels change: "+
				cmp.Or(i.Error, "identity has not listed them yet"))
		}
	}
	// Two may say the same.
	slices.Sort(all)
	return slices.Compact(all)
}

func (s *Node) table(w io.Writer) {
	output.Row(w, "COMPONENT", "SERVING", "UP", "VERSION")
	for _, service := range s.Services {
		serving := "no"
		if service.Serving {
			serving = "yes"
		}
		output.Row(w, "sluice-"+service.Name, serving, output.Since(service.Started), service.Version)
	}
	fmt.Fprintln(w)
	output.Row(w, "Ready", s.readyText())
	if i := s.Identity; i != nil {
		store := "reached"
		switch {
		case !i.StoreReached:
			store = "away: " + i.StoreError
		case i.StoreError != "":
			store = "reached; it refuses what this node writes"
		}
		output.Row(w, "etcd", store)
		output.Row(w, "Node", i.Node)
		output.Row(w, "Identities", fmt.Sprintf("%d in the cluster, %d held here", i.Cluster, i.Held))
	}
	if c := s.Cluster; c != nil {
		output.Row(w, "Cluster", c.text())
	}
	for _, p := range s.Pools {
		free := output.Count(p.GetFreeCount()) + " free"
		switch p.GetState() {
		case ipamv1.RangeState_RANGE_STATE_DRAINING, ipamv1.RangeState_RANGE_STATE_REFUSED:
			free = output.Enum(p.GetState(), "RANGE_STATE_")
		}
		output.Row(w, "Pool", fmt.Sprintf("%s: %d confirmed, %d leased, %d in quarantine, %s", p.GetPrefix(),
			p.GetConfirmedCount(), p.GetLeasedCount(), p.GetQuarantinedCount(), free))
	}
	if p := s.Policy; p != nil {
		p.rows(w)
	}
	if b := s.LoadBalancer; b != nil {
		b.rows(w, s.translatesNone())
	}
	if d := s.Datapath; d != nil {
		d.rows(w, s.Policy)
	}
	if len(s.Problems)+len(s.Warnings) > 0 {
		fmt.Fprintln(w)
	}
	for _, problem := range s.Problems {
		fmt.Fprintln(w, "Problem: "+output.Printable(problem))
	}
	for _, warning := range s.Warnings {
		fmt.Fprintln(w, "Warning: "+output.Printable(warning))
	}
	for _, text := range s.Meanwhile {
		fmt.Fprintln(w, "Meanwhile: "+output.Printable(text))
	}
}

// text counts the nodes of the cluster, what they say, and what of it is refused.
func (c *clusterStatus) text() string {
	text := fmt.Sprintf("%d nodes, %d mappings of others", c.Nodes, c.Mappings)
	if !c.Registered {
		text = "not registered; " + text
	}
	for _, more := range []struct {
		n    uint32
		what string
	}{
		{c.RefusedMappings, "of others refused"},
		{c.RefusedRanges, "ranges of this node refused"},
		{c.Pending, "endpoints wait to be published"},
	} {
		if more.n > 0 {
			text += fmt.Sprintf("; %d %s", more.n, more.what)
		}
	}
	return text
}

// rows are the policies, their tables and sources.
func (p *policyStatus) rows(w io.Writer) {
	output.Row(w, "Policies", fmt.Sprintf("%d in force, %d refused, revision %d", p.Policies, p.Refused, p.Revision))
	output.Row(w, "Tables", fmt.Sprintf("%d for %d subjects, %d identities known", p.Tables, p.Subjects, p.Identities))
	var sources []string
	for _, source := range p.Sources {
		name := strings.TrimSuffix(source.Name+" "+source.Manager, " ")
		if !source.Synced {
			name += " (not complete yet)"
		}
		sources = append(sources, name)
	}
	output.Row(w, "Sources", strings.Join(sources, ", "))
	for _, text := range p.Skipped {
		output.Row(w, "Skipped", output.Printable(text))
	}
	if p.WaitingIdentities > 0 {
		output.Row(w, "Unknown", fmt.Sprintf("%d identities, because a table has no room", p.WaitingIdentities))
	}
}

// rows are the endpoints, what evaluates them, and the kernel.
func (d *datapathStatus) rows(w io.Writer, p *policyStatus) {
	states := []string{}
	for _, state := range []string{
		"ready", "damaged", "waiting-for-identity", "waiting-for-policy", "restoring", "disconnecting",
	} {
		if n := d.Endpoints[state]; n > 0 {
			states = append(states, fmt.Sprintf("%d %s", n, state))
		}
	}
	output.Row(w, "Endpoints", strings.Join(states, ", "))
	output.Row(w, "Policy", d.policyText(p))
	if f := d.Frontends; f != nil {
		output.Row(w, "Translated", f.text())
	}
	if i := d.IdentityStream; i != nil {
		text := fmt.Sprintf("%d endpoints, %d pending", i.Changed, i.Pending)
		if !i.Complete {
			text += "; the stream from identity is not open"
		}
		output.Row(w, "Relabelled", text)
	}
	if p := d.NodeProbes; p != nil && p.Nodes > 0 {
		output.Row(w, "Nodes", p.text())
	}
	if r := d.PodRouting; r != nil {
		output.Row(w, "Routing", r.text())
	}
	if n := d.Connections; n != nil {
		output.Row(w, "Connections", fmt.Sprintf("%d live; %d begun, %d ended by policy, %d expired, %d evicted", n.Live,
			n.Created, n.Revoked, n.Expired, n.Evicted))
	}
	if len(d.Maps) > 0 {
		var sum uint64
		for _, m := range d.Maps {
			sum += m.GetBytes()
		}
		output.Row(w, "Maps", fmt.Sprintf("%d, %s", len(d.Maps), output.Bytes(sum)))
	}
	output.Row(w, "Kernel", d.Kernel)
	output.Row(w, "Repairs",
		fmt.Sprintf("attachments %d, devices %d, node %d", d.AttachmentRepair, d.DeviceRepairs, d.NodeRepairs))
	if d.PendingReleases > 0 {
		output.Row(w, "Pending", fmt.Sprintf("%d releases wait for identity or ipam", d.PendingReleases))
	}
	if len(d.Packets) > 0 {
		fmt.Fprintln(w)
		output.Row(w, "PACKETS", "DIRECTION", "VERDICT", "REASON")
		for _, packets := range d.Packets {
			verdict := "forwarded"
			if packets.Dropped {
				verdict = "dropped"
			}
			output.Row(w, packets.Packets, packets.Direction, verdict, packets.Reason)
		}
	}
}

// policyText says which policies the kernel enforces.
func (d *datapathStatus) policyText(p *policyStatus) string {
	if d.PolicyMode == "none" {
		return "none: nothing is enforced, every pod may talk to every pod"
	}
	text := fmt.Sprintf("%s; the kernel enforces revision %d", d.PolicyMode, d.PolicyRevision)
	if p != nil && p.Revision > d.PolicyRevision {
		text += fmt.Sprintf(" of %d", p.Revision)
	}
	return text
}
