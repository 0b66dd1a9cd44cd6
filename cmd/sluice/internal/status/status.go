// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

// Package status shows whether the services of a node answer and whether containers can be connected.
package status

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/spf13/cobra"
	"golang.org/x/sync/errgroup"

	"github.com/sluice-net/sluice/cmd/sluice/internal/invocation"
	"github.com/sluice-net/sluice/cmd/sluice/internal/output"
	"github.com/sluice-net/sluice/cmd/sluice/internal/output/message"
	datapathv1 "github.com/sluice-net/sluice/proto/gen/sluice/datapath/v1"
	identityv1 "github.com/sluice-net/sluice/proto/gen/sluice/identity/v1"
	ipamv1 "github.com/sluice-net/sluice/proto/gen/sluice/ipam/v1"
	lbv1 "github.com/sluice-net/sluice/proto/gen/sluice/loadbalancer/v1"
	policyv1 "github.com/sluice-net/sluice/proto/gen/sluice/policy/v1"
	statusv1 "github.com/sluice-net/sluice/proto/gen/sluice/status/v1"
)

// Command is `status`.
func Command(inv *invocation.Invocation) *cobra.Command {
	var watch bool
	var wait waiting
	cmd := &cobra.Command{
		Use:   "status",
		Short: "Show whether the services answer and containers can be connected",
		Long: fmt.Sprintf(`Show whether every service answers and whether containers can be connected now, including
containers with labels that are new to this node. The exit code is %d if a service does not
answer, if containers cannot be connected, or if there are warnings. Lines that begin with
Meanwhile list what still works while a service is unavailable, and what you can do.`, invocation.ExitNotReady),
		Args: invocation.Args(0, ""),
		RunE: func(cmd *cobra.Command, _ []string) error {
			switch {
			case watch && wait.limit > 0:
				return invocation.Usagef("--watch and --wait exclude each other")
			case watch:
				return watchNode(cmd.Context(), inv)
			case wait.limit > 0:
				return await(cmd.Context(), inv, wait.limit)
			}
			return once(cmd.Context(), inv)
		},
	}
	cmd.Flags().BoolVar(&watch, "watch", false,
		"watch for changes: on a terminal show the whole status, otherwise one line per change")
	wait.flag(cmd)
	return cmd
}

// Node is the output of `status -o json`.
type Node struct {
	Ready    bool     `json:"ready"`         // ADD works for any labels
	Known    bool     `json:"readyForKnown"` // ADD works for label sets in use on this node
	Problems []string `json:"problems"`
	Warnings []string `json:"warnings"`
	// Meanwhile describes which functions work while some services are unavailable, and the next steps.
	Meanwhile []string        `json:"meanwhile"`
	Services  []serviceStatus `json:"services"`
	// The status of each service; absent if it does not answer.
	Identity     message.One[*identityv1.GetStatusResponse] `json:"identity,omitzero"`
	IPAM         message.One[*ipamv1.GetStatusResponse]     `json:"ipam,omitzero"`
	Policy       message.One[*policyv1.GetStatusResponse]   `json:"policy,omitzero"`
	LoadBalancer message.One[*lbv1.GetStatusResponse]       `json:"loadBalancer,omitzero"`
	Datapath     message.One[*datapathv1.GetStatusResponse] `json:"datapath,omitzero"`
}

type serviceStatus struct {
	Name    string     `json:"name"`
	Serving bool       `json:"serving"`
	Error   string     `json:"error,omitempty"`
	Version string     `json:"version,omitempty"`
	Started *time.Time `json:"startTime,omitempty"`
	denied  bool       // the caller has no permission to open the socket
	away    bool       // the service did not answer
	known   bool       // Error affects only label sets that are new to this node
	node    string     // name of the node in its settings; may be empty
	nodeKey string     // key of that setting
}

func once(ctx context.Context, inv *invocation.Invocation) error {
	if err := instanceExists(inv); err != nil {
		return err
	}
	s, err := collect(ctx, inv)
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

// instanceExists returns an error if --instance names an instance that this machine does not have.
func instanceExists(inv *invocation.Invocation) error {
	socket, err := inv.Socket("datapath")
	if err != nil || inv.Instance == "" || inv.RunDir != "" {
		return err
	}
	dir := filepath.Dir(filepath.Dir(socket))
	if _, err := os.Stat(dir); errors.Is(err, fs.ErrNotExist) {
		return errors.New(strings.TrimSpace(fmt.Sprintf("no instance %s on this machine: %s does not exist\n%s",
			inv.Instance, dir, inv.OtherNodes())))
	}
	return nil
}

// noDirectory returns a warning if the directory of the sockets does not exist.
func noDirectory(inv *invocation.Invocation) (string, error) {
	socket, err := inv.Socket("datapath")
	if err != nil {
		return "", err
	}
	dir := filepath.Dir(filepath.Dir(socket))
	if _, err := os.Stat(dir); !errors.Is(err, fs.ErrNotExist) {
		return "", nil
	}
	return fmt.Sprintf("%s does not exist: Sluice is not installed on this machine, or `sluice prepare` did not run; "+
		"to see a node of `sluice dev up`, name it with --instance or SLUICE_INSTANCE", dir), nil
}

// collect asks all services.
func collect(ctx context.Context, inv *invocation.Invocation) (*Node, error) {
	ctx, cancel := context.WithTimeout(ctx, inv.Timeout)
	defer cancel()
	s := &Node{Problems: []string{}, Meanwhile: []string{}, Services: []serviceStatus{
		{Name: "identity"},
		{Name: "ipam"},
		{Name: "policy"},
		{Name: "loadbalancer"},
		{Name: "datapath"},
		{Name: "dns"},
		{Name: "http"},
	}}
	var wg errgroup.Group
	for i := range s.Services {
		service := &s.Services[i]
		wg.Go(func() error { return ask(ctx, inv, service, s) })
	}
	if err := wg.Wait(); err != nil {
		return nil, err
	}
	s.dropUnused(map[string]bool{
		"dns": invocation.Runs(inv, invocation.DNS), "http": invocation.Runs(inv, invocation.HTTP),
	})
	s.judge()
	s.Warnings = s.warnings()
	if hint := inv.OtherNodes(); hint != "" && !slices.ContainsFunc(s.Services,
		func(service serviceStatus) bool { return service.Serving }) {
		s.Warnings = append(s.Warnings, strings.TrimSpace(hint))
	}
	if hint := accessHint(s.Services); hint != "" {
		s.Warnings = append(s.Warnings, hint)
	}
	missing, err := noDirectory(inv)
	if err != nil {
		return nil, err
	}
	if missing != "" {
		s.Warnings = append(s.Warnings, missing)
		return s, nil // Meanwhile describes a node that is down but whose state still exists
	}
	s.Meanwhile = s.meanwhile(inv)
	return s, nil
}

// judge sets Ready, Known and Problems.
func (s *Node) judge() {
	s.Problems = append(s.Problems, exhausted(s.IPAM.Message.GetPools())...)
	if why := s.LoadBalancer.Message.GetSystemRefused(); why != "" {
		// A container would start without access to the cluster's DNS or API server.
		s.Problems = append(s.Problems, "sluice-loadbalancer: "+why)
	}
	s.Known = len(s.Problems) == 0
	// While sluice-identity or sluice-policy is unavailable, the datapath can still connect containers whose label
	// sets are in use on this node.
	stands := s.Datapath.Message.GetAddReady() || s.Datapath.Message.GetKnownAddReady()
	for _, service := range s.Services {
		switch {
		case service.Name == "loadbalancer", service.Name == "dns", service.Name == "http":
			// Containers can be connected without them: the kernel has the services.
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

// standsIn reports whether the datapath can, without this service, still connect containers whose label sets are in use
// on this node.
func (s *serviceStatus) standsIn() bool { return s.Name == "identity" || s.Name == "policy" }

func (s *Node) readyText() string {
	switch {
	case s.Ready:
		return "yes"
	case s.Known:
		return "only for label sets that this node has"
	}
	return "no"
}

// accessHint returns a text that names the users who have access, if a socket could not be opened for lack of
// permission.
func accessHint(services []serviceStatus) string {
	if slices.ContainsFunc(services, func(service serviceStatus) bool { return service.denied }) {
		return invocation.WhoMay
	}
	return ""
}

// dropUnused removes services that do not answer and that the node does not need. proxies says which proxies have a
// socket: they run, or were killed.
func (s *Node) dropUnused(proxies map[string]bool) {
	d := s.Datapath.Message
	s.Services = slices.DeleteFunc(s.Services, func(service serviceStatus) bool {
		unused := service.Name == "policy" && d != nil && d.GetPolicyMode() == datapathv1.PolicyMode_POLICY_MODE_NONE ||
			service.Name == "loadbalancer" && s.translatesNone()
		if has, isProxy := proxies[service.Name]; isProxy {
			unused = !has
		}
		return unused && service.Error != "" && service.Version == ""
	})
}

// exhausted returns the address families without a free address. Addresses in quarantine do not count as free.
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

// translatesNone reports whether the datapath is configured not to translate services.
func (s *Node) translatesNone() bool {
	return s.Datapath.Message != nil && s.Datapath.Message.GetFrontendStream() == nil
}

// warnings returns problems that do not prevent containers from being connected.
func (s *Node) warnings() []string {
	all := []string{}
	i := s.Identity.Message
	for _, p := range i.GetService().GetProblems() {
		switch p.GetReason() {
		case statusv1.ProblemReason_PROBLEM_REASON_STORE, statusv1.ProblemReason_PROBLEM_REASON_STORAGE:
			// The error of the service already contains these problems.
		default:
			all = append(all, "sluice-identity: "+p.GetText())
		}
	}
	for _, p := range s.IPAM.Message.GetService().GetProblems() {
		if p.GetReason() == statusv1.ProblemReason_PROBLEM_REASON_STORE {
			all = append(all, "sluice-ipam: "+p.GetText())
		}
	}
	if c := i.GetCluster(); c != nil { // nil from a service of an older version
		if !c.GetRegistered() && i.GetStoreConnected() {
			all = append(all, "sluice-identity: this node is not registered: other nodes do not know the addresses of its "+
				"containers; sluice-ipam registers it if it has the setting identity")
		}
		if n := c.GetRefusedMappings(); n > 0 {
			all = append(all, fmt.Sprintf("sluice-identity: %d addresses that other nodes wrote are refused; "+
				"`sluice node list` names the nodes, `sluice ip get` gives the reason for an address", n))
		}
		if why := c.GetPublicationError(); why != "" && i.GetStoreConnected() {
			all = append(all, "sluice-identity: this node cannot publish its state to the cluster: "+why)
		}
	}
	all = append(all, policyWarnings(s.Policy.Message)...)
	if b := s.LoadBalancer.Message; b != nil {
		all = append(all, loadBalancerWarnings(b, s.translatesNone())...)
	}
	for _, service := range s.Services {
		if name := i.GetNodeName(); service.node != "" && name != "" && service.node != name {
			all = append(all, fmt.Sprintf("sluice-%s: the setting %s is %q, but sluice-identity calls this node %q: make the "+
				"two equal", service.Name, service.nodeKey, service.node, name))
		}
		without := map[string]string{
			"loadbalancer": "services cannot be changed", "dns": "addresses are not learned from DNS answers",
			"http": "connections that HTTP rules or server names are about are dropped",
		}[service.Name]
		switch {
		case without == "":
		case service.Error != "":
			all = append(all, "sluice-"+service.Name+": "+without+": "+service.Error)
		case !service.Serving:
			all = append(all, "sluice-"+service.Name+" is not ready: "+without)
		}
	}
	if d := s.Datapath.Message; d != nil {
		for _, state := range []datapathv1.EndpointState{
			datapathv1.EndpointState_ENDPOINT_STATE_WAITING_FOR_IDENTITY,
			datapathv1.EndpointState_ENDPOINT_STATE_WAITING_FOR_POLICY, datapathv1.EndpointState_ENDPOINT_STATE_RESTORING,
		} {
			if n := endpointsIn(d, state); n > 0 {
				all = append(all, fmt.Sprintf("sluice-datapath: %s in the state %s",
					output.Plural(n, "endpoint", "endpoints"), stateText(state)))
			}
		}
		for _, refusal := range d.GetPolicyRefusals() {
			all = append(all, "sluice-datapath: not enforced: "+refusal)
		}
		for _, warning := range d.GetWarnings() {
			all = append(all, "sluice-datapath: "+warning)
		}
		all = append(all, frontendWarnings(d.GetFrontendStream(), s.LoadBalancer.Message)...)
		if i := d.GetIdentityStream(); i != nil && !i.GetComplete() {
			all = append(all, "sluice-datapath: label changes are not applied: "+
				cmp.Or(i.GetError(), "sluice-identity has not sent the identities yet"))
		}
	}
	// Remove duplicates.
	slices.Sort(all)
	return slices.Compact(all)
}

// policyWarnings returns problems of policies; p is nil if the service does not answer.
func policyWarnings(p *policyv1.GetStatusResponse) (all []string) {
	problems := textsOf(p.GetService())
	for _, problem := range problems {
		all = append(all, "sluice-policy: "+problem)
	}
	if p.GetRefused() > 0 && len(problems) == 0 {
		all = append(all, fmt.Sprintf("sluice-policy: %d policies or files were refused; see `sluice policy list --refused`",
			p.GetRefused()))
	}
	if n := p.GetPoliciesWithUnsupportedFields(); n > 0 {
		all = append(all, fmt.Sprintf("sluice-policy: policies with fields that Sluice does not support: %d; see `sluice "+
			"policy list`", n))
	}
	for _, source := range p.GetSources() {
		switch {
		case source.GetError() != "":
			all = append(all, "sluice-policy: source "+source.GetName()+": "+source.GetError())
		case !source.GetSynced():
			all = append(all, "sluice-policy: source "+source.GetName()+" is not complete yet")
		}
	}
	if n := p.GetWaitingIdentities(); n > 0 {
		all = append(all, fmt.Sprintf("sluice-policy: a policy table is full; identities that it lacks: %d", n))
	}
	return all
}

// endpointsIn counts the endpoints in a state.
func endpointsIn(d *datapathv1.GetStatusResponse, state datapathv1.EndpointState) (n uint32) {
	for _, e := range d.GetEndpoints() {
		if e.GetState() == state {
			n += e.GetCount()
		}
	}
	return n
}

func stateText(state datapathv1.EndpointState) string { return output.Enum(state, "ENDPOINT_STATE_") }

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
	if i := s.Identity.Message; i != nil {
		store := "reached"
		switch {
		case !i.GetStoreConnected():
			store = "unavailable: " + i.GetStoreError()
		case i.GetStoreError() != "":
			store = "reached; it refuses writes of this node"
		}
		output.Row(w, "etcd", store)
		output.Row(w, "Node", i.GetNodeName())
		output.Row(w, "Identities", fmt.Sprintf("%d in the cluster, %d held here", i.GetClusterIdentities(),
			i.GetHeldIdentities()))
		if i.GetCluster() != nil {
			output.Row(w, "Cluster", clusterText(i.GetCluster()))
		}
	}
	for _, p := range s.IPAM.Message.GetPools() {
		free := output.Count(p.GetFreeCount()) + " free"
		switch p.GetState() {
		case ipamv1.RangeState_RANGE_STATE_DRAINING, ipamv1.RangeState_RANGE_STATE_REFUSED:
			free = output.Enum(p.GetState(), "RANGE_STATE_")
		}
		output.Row(w, "Pool", fmt.Sprintf("%s: %d confirmed, %d leased, %d in quarantine, %s", p.GetPrefix(),
			p.GetConfirmedCount(), p.GetLeasedCount(), p.GetQuarantinedCount(), free))
	}
	if p := s.Policy.Message; p != nil {
		policyRows(w, p)
	}
	if b := s.LoadBalancer.Message; b != nil {
		loadBalancerRows(w, b, s.translatesNone())
	}
	if d := s.Datapath.Message; d != nil {
		datapathRows(w, d, s.Policy.Message)
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

// clusterText returns the number of nodes and mappings, and of refused or unpublished ones.
func clusterText(c *identityv1.ClusterStatus) string {
	text := fmt.Sprintf("%s, %s of others", output.Plural(c.GetNodes(), "node", "nodes"),
		output.Plural(c.GetMappings(), "mapping", "mappings"))
	if !c.GetRegistered() {
		text = "not registered; " + text
	}
	for _, more := range []struct {
		n         uint32
		one, many string
	}{
		{c.GetRefusedMappings(), "of others refused", "of others refused"},
		{c.GetRefusedRanges(), "range of this node refused", "ranges of this node refused"},
		{c.GetPendingPublications(), "endpoint not yet published", "endpoints not yet published"},
	} {
		if more.n > 0 {
			text += "; " + output.Plural(more.n, more.one, more.many)
		}
	}
	return text
}

// source has the common methods of sources of policies and of services.
type source interface {
	GetName() string
	GetManager() string
	GetSynced() bool
}

// sourceName returns the name of a source with its manager.
func sourceName(s source) string { return strings.TrimSuffix(s.GetName()+" "+s.GetManager(), " ") }

// sourcesText returns the names of the sources, with a remark for incomplete ones.
func sourcesText[S source](all []S) string {
	names := make([]string, len(all))
	for i, s := range all {
		names[i] = sourceName(s)
		if !s.GetSynced() {
			names[i] += " (not complete yet)"
		}
	}
	return strings.Join(names, ", ")
}

// policyRows writes the rows about policies.
func policyRows(w io.Writer, p *policyv1.GetStatusResponse) {
	output.Row(w, "Policies", fmt.Sprintf("%d accepted, %d refused, revision %d", p.GetPolicies(), p.GetRefused(),
		p.GetRevision()))
	output.Row(w, "Tables", fmt.Sprintf("%d for %s, %s known", p.GetTables(),
		output.Plural(p.GetSubjects(), "subject", "subjects"),
		output.Plural(p.GetIdentities(), "identity", "identities")))
	output.Row(w, "Sources", sourcesText(p.GetSources()))
	for _, text := range p.GetSkippedDocuments() {
		output.Row(w, "Skipped", output.Printable(text))
	}
	if n := p.GetWaitingIdentities(); n > 0 {
		output.Row(w, "Unknown", output.Plural(n, "identity", "identities")+", because a policy table is full")
	}
}

// packetColumns are the columns of the packet counters.
var packetColumns = []output.Column[*datapathv1.PacketCounter]{
	{Header: "PACKETS", Cell: func(p *datapathv1.PacketCounter) any { return p.GetPackets() }},
	{Header: "DIRECTION", Cell: func(p *datapathv1.PacketCounter) any {
		return output.Enum(p.GetDirection(), "DIRECTION_")
	}},
	{Header: "VERDICT", Cell: func(p *datapathv1.PacketCounter) any {
		if p.GetDropped() {
			return "dropped"
		}
		return "forwarded"
	}},
	{Header: "REASON", Cell: func(p *datapathv1.PacketCounter) any { return output.Enum(p.GetReason(), "REASON_") }},
}

// datapathRows writes the rows about the datapath and the kernel.
func datapathRows(w io.Writer, d *datapathv1.GetStatusResponse, p *policyv1.GetStatusResponse) {
	states := []string{}
	for _, state := range []datapathv1.EndpointState{
		datapathv1.EndpointState_ENDPOINT_STATE_READY, datapathv1.EndpointState_ENDPOINT_STATE_DAMAGED,
		datapathv1.EndpointState_ENDPOINT_STATE_WAITING_FOR_IDENTITY,
		datapathv1.EndpointState_ENDPOINT_STATE_WAITING_FOR_POLICY, datapathv1.EndpointState_ENDPOINT_STATE_RESTORING,
		datapathv1.EndpointState_ENDPOINT_STATE_DISCONNECTING,
	} {
		if n := endpointsIn(d, state); n > 0 {
			states = append(states, fmt.Sprintf("%d %s", n, stateText(state)))
		}
	}
	output.Row(w, "Endpoints", strings.Join(states, ", "))
	output.Row(w, "Policy", policyText(d, p))
	if f := d.GetFrontendStream(); f != nil {
		output.Row(w, "Translated", frontendText(f))
	}
	if i := d.GetIdentityStream(); i != nil {
		text := fmt.Sprintf("%s, %d pending", output.Plural(i.GetChanged(), "endpoint", "endpoints"), i.GetPending())
		if !i.GetComplete() {
			text += "; the stream from identity is not open"
		}
		output.Row(w, "Relabelled", text)
	}
	if p := d.GetNodeProbes(); p.GetNodes() > 0 {
		output.Row(w, "Nodes", probesText(p))
	}
	if r := d.GetPodRouting(); r != nil {
		output.Row(w, "Routing", routingText(r))
	}
	for _, p := range d.GetProxies() {
		output.Row(w, "Proxy", proxyText(p))
	}
	if n := d.GetConnections(); n != nil {
		output.Row(w, "Connections", fmt.Sprintf("%d live; %d begun, %d ended by policy, %d expired, %d evicted",
			n.GetLive(), n.GetCreated(), n.GetRevoked(), n.GetExpired(), n.GetEvicted()))
	}
	if len(d.GetMaps()) > 0 {
		var sum uint64
		for _, m := range d.GetMaps() {
			sum += m.GetBytes()
		}
		output.Row(w, "Maps", fmt.Sprintf("%d, %s", len(d.GetMaps()), output.Bytes(sum)))
	}
	output.Row(w, "Kernel", d.GetKernelRelease())
	output.Row(w, "Repairs", fmt.Sprintf("attachments %d, devices %d, node %d", d.GetAttachmentRepairs(),
		d.GetDeviceRepairs(), d.GetNodeRepairs()))
	if n := d.GetPendingReleases(); n > 0 {
		output.Row(w, "Pending", output.Plural(n, "release", "releases")+" to identity or ipam")
	}
	counted := slices.DeleteFunc(slices.Clone(d.GetPacketCounters()), func(p *datapathv1.PacketCounter) bool {
		return p.GetPackets() == 0
	})
	if len(counted) > 0 {
		fmt.Fprintln(w)
		output.Table(w, packetColumns, counted)
	}
}

// policyText returns which policies the kernel enforces.
func policyText(d *datapathv1.GetStatusResponse, p *policyv1.GetStatusResponse) string {
	if d.GetPolicyMode() == datapathv1.PolicyMode_POLICY_MODE_NONE {
		return "none: no policy is enforced; every pod can reach every pod"
	}
	text := fmt.Sprintf("%s; the kernel enforces revision %d", output.Enum(d.GetPolicyMode(), "POLICY_MODE_"),
		d.GetPolicyRevision())
	if p.GetRevision() > d.GetPolicyRevision() {
		text += fmt.Sprintf(" of %d", p.GetRevision())
	}
	return text
}

// probesText returns how many nodes answer probes, with the slowest round trip.
func probesText(p *datapathv1.NodeProbes) string {
	text := fmt.Sprintf("%d of %d other nodes answer", p.GetAnsweringNodes(), p.GetNodes())
	if slowest := p.GetSlowestUs(); slowest > 0 {
		digits := 1
		if slowest < 100 {
			digits = 2
		}
		text += fmt.Sprintf(", slowest %.*f ms", digits, float64(slowest)/1000)
	}
	return text
}

// proxyText returns whether a proxy is attached, with its device and the age of its heartbeat, or why none can be.
func proxyText(p *datapathv1.ProxyStatus) string {
	kind := output.Enum(p.GetProxy(), "PROXY_")
	switch {
	case p.GetAttached() && p.GetHeartbeatAge() == nil:
		return fmt.Sprintf("%s: attached for %s to %s, no heartbeat yet", kind,
			output.Since(output.When(p.GetAttachedSince())), p.GetDevice())
	case p.GetAttached():
		return fmt.Sprintf("%s: attached for %s to %s, last heartbeat %s ago", kind,
			output.Since(output.When(p.GetAttachedSince())), p.GetDevice(),
			p.GetHeartbeatAge().AsDuration().Round(time.Millisecond))
	case p.GetProblem() != "":
		return kind + ": none can attach: " + output.Printable(p.GetProblem())
	}
	return kind + ": none attached"
}

// routingText describes the path of packets between pods of two nodes.
func routingText(r *datapathv1.PodRouting) string {
	if r.GetMode() == "overlay" {
		return r.GetMode() + tunnelText(r)
	}
	if r.GetReason() == "" {
		return r.GetMode()
	}
	path := "bypassing the host's stack"
	if r.GetByStack() {
		path = "through the host's stack"
	}
	return r.GetMode() + ", " + path + " (" + r.GetReason() + ")"
}

// tunnelText describes which tunnel packets bypass the tunnel device.
func tunnelText(r *datapathv1.PodRouting) string {
	paths := r.GetTunnelPaths()
	if len(paths) == 0 {
		return ""
	}
	if r.GetReason() != "" {
		return ", through the tunnel device (" + r.GetReason() + ")"
	}
	direct, nodes := 0, map[string][]string{}
	for _, p := range paths {
		if p.GetBypassesDevice() {
			direct++
		} else {
			nodes[p.GetReason()] = append(nodes[p.GetReason()], p.GetNode())
		}
	}
	text := fmt.Sprintf(", bypassing the tunnel device to %d of %s", direct, output.Plural(len(paths), "node", "nodes"))
	var reasons []string
	for _, reason := range slices.Sorted(maps.Keys(nodes)) {
		names := nodes[reason]
		if len(names) > maxNames {
			names = append(slices.Clone(names[:maxNames]), "...")
		}
		reasons = append(reasons, strings.Join(names, ", ")+": "+reason)
	}
	if len(reasons) > 0 {
		text += " (" + strings.Join(reasons, "; ") + ")"
	}
	if rules := r.GetBypassedRules(); len(rules) > 0 {
		named := rules
		if len(rules) > maxNames {
			named = append(slices.Clone(rules[:maxNames]), "...")
		}
		text += fmt.Sprintf("; the packets bypass %s for the tunnel's port: %s",
			output.Plural(len(rules), "firewall rule", "firewall rules"), strings.Join(named, ", "))
	}
	return text
}

// maxNames is the number of nodes that the text names for each reason, and of firewall rules.
const maxNames = 3
