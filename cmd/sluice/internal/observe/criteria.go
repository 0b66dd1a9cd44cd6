// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package observe

import (
	"net/netip"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/spf13/pflag"
	"google.golang.org/protobuf/types/known/timestamppb"

	"github.com/sluice-net/sluice/cmd/sluice/internal/endpoint"
	"github.com/sluice-net/sluice/cmd/sluice/internal/flagvalue"
	"github.com/sluice-net/sluice/cmd/sluice/internal/invocation"
	"github.com/sluice-net/sluice/cmd/sluice/internal/selector"
	"github.com/sluice-net/sluice/cmd/sluice/internal/service"
	"github.com/sluice-net/sluice/kit/rpc/rpcerr"
	"github.com/sluice-net/sluice/model/identity"
	datapathv1 "github.com/sluice-net/sluice/proto/gen/sluice/datapath/v1"
	netv1 "github.com/sluice-net/sluice/proto/gen/sluice/net/v1"
	workloadv1 "github.com/sluice-net/sluice/proto/gen/sluice/workload/v1"
)

// Flags are the criteria as given, and where what meets them goes.
type Flags struct {
	Follow bool // stay and show new events
	Last   uint // so many of what is remembered; 0: all

	since, until string
	file         string
	fileSize     invocation.Size
	files        uint
	criteria     []criterion // in the order of the command line
	not          bool        // the next criterion is turned into its opposite
}

// criterion is one flag as given.
type criterion struct {
	not         bool
	name, value string
}

// kind is what a criterion is about, and its flag.
type kind struct {
	name   string
	commas bool // a value may be several, with commas between
	help   string
	add    func(to *datapathv1.FlowCriteria, value string, n *names) error
}

// kindFlag is the flag of a kind.
type kindFlag struct {
	kind

	flags *Flags
}

// String implements pflag.Value.
func (k kindFlag) String() string { return "" }

// Type implements pflag.Value.
func (k kindFlag) Type() string {
	if k.commas {
		return "strings"
	}
	return "string"
}

// Set implements pflag.Value.
func (k kindFlag) Set(text string) error {
	k.flags.criteria = append(k.flags.criteria, criterion{k.flags.not, k.name, text})
	k.flags.not = false
	return nil
}

func (c criterion) kind() kind {
	return kinds[slices.IndexFunc(kinds, func(k kind) bool { return k.name == c.name })]
}

// values are the texts of a criterion.
func (c criterion) values() []string {
	if c.kind().commas {
		return strings.Split(c.value, ",")
	}
	return []string{c.value}
}

// kinds are the criteria: how each is added to others. A new one is also one of `kubernetes observe`.
var kinds = []kind{
	{
		"container", true,
		"events about CONTAINER or CONTAINER/INTERFACE; of a container that is there, the start of its id is enough",
		addContainer,
	},
	{"pod", true, "events about the pod [NAMESPACE/]NAME of this node", addPod},
	{
		"from", false, "events whose sender is a container, pod, address, prefix, identity or has labels",
		func(c *datapathv1.FlowCriteria, value string, n *names) error {
			return addEnd(sourceOf(c), "--from", value, n)
		},
	},
	{
		"to", false, "events whose receiver is one, as --from",
		func(c *datapathv1.FlowCriteria, value string, n *names) error {
			return addEnd(destinationOf(c), "--to", value, n)
		},
	},
	{
		"from-port", true, "events with this source port",
		func(c *datapathv1.FlowCriteria, value string, _ *names) error {
			return addPort(&sourceOf(c).Ports, "--from-port", value)
		},
	},
	{
		"to-port", true, "events with this destination port, or that asked for it",
		func(c *datapathv1.FlowCriteria, value string, _ *names) error {
			return addPort(&destinationOf(c).Ports, "--to-port", value)
		},
	},
	{
		"identity", true, "events with this identity on either side",
		func(c *datapathv1.FlowCriteria, value string, _ *names) error {
			n, err := identityOf("--identity", value)
			c.Identities = append(c.Identities, n)
			return err
		},
	},
	{
		"address", true, "events with an address in this prefix on either side, or asked for",
		func(c *datapathv1.FlowCriteria, value string, _ *names) error {
			p, err := flagvalue.Prefix("--address", value)
			c.Prefixes = append(c.Prefixes, p.String())
			return err
		},
	},
	{"reason", true, "events with this reason, for example spoofed-ip", addReason},
	{"direction", false, "egress or ingress, seen from the container", addDirection},
	{"protocol", true, "tcp, udp, sctp, icmp, icmpv6 or a number", addProtocol},
	{
		"port", true, "events with this port on either side, or asked for",
		func(c *datapathv1.FlowCriteria, value string, _ *names) error {
			return addPort(&c.Ports, "--port", value)
		},
	},
	{
		"label", false,
		"events with a pod of these labels on either side, as kubectl selects: app=web,tier in (a,b),!x; may be repeated",
		addLabel,
	},
	{
		"service", true,
		"events of packets to the service [NAMESPACE/]NAME, and of those to its backends that name no service",
		addService,
	},
	{"verdict", true, "forwarded, dropped, audited or redirected", addVerdict},
	{"type", true, "drop, policy-verdict or connection-closed", addType},
}

// Check finds mistakes in the criteria, but not in names of containers and pods.
func (o *Flags) Check() error {
	_, err := o.request(time.Now(), nil)
	return err
}

// Add adds the criteria to a command.
func (o *Flags) Add(f *pflag.FlagSet) {
	f.BoolVarP(&o.Follow, "follow", "f", false, "stay and show new events")
	f.StringVar(&o.since, "since", "",
		"begin with events of this long ago, for example 1m, or of a time: "+timeForms)
	f.StringVar(&o.until, "until", "", "leave out events that are later, given likewise; --follow ends then")
	f.UintVar(&o.Last, "last", 0, "of what is remembered and meets the criteria, only so many of the latest, at most 4096")
	for _, k := range kinds {
		f.Var(kindFlag{k, o}, k.name, k.help)
	}
	f.BoolVar(&o.not, "not", false, "leave out events that meet the next criterion")
	o.addFile(f)
}

// PodPlace is where a pod is, and what other nodes know it by.
type PodPlace struct {
	Node      string
	Addresses []string
}

// PodNames are the pods NAMESPACE/NAME that the criteria name, each once. What --from and --to name may be the
// interface of a container as well.
func (o *Flags) PodNames() []string {
	var names []string
	for _, c := range o.criteria {
		for _, value := range c.values() {
			if name := c.podName(value); name != "" && !slices.Contains(names, name) {
				names = append(names, name)
			}
		}
	}
	return names
}

// podName is the pod NAMESPACE/NAME that a value may be; empty if it is none.
func (c criterion) podName(value string) string {
	value = strings.TrimSpace(value)
	namespace, name, found := strings.Cut(value, "/")
	switch {
	case c.name == "pod" && !found:
		namespace, name = "default", value
	case c.name != "pod" && c.name != "from" && c.name != "to", !found, strings.ContainsAny(value, "=!(,: "):
		return ""
	}
	if namespace == "" || name == "" || strings.Contains(name, "/") {
		return ""
	}
	if _, err := flagvalue.Prefix("", value); err == nil {
		return ""
	}
	return namespace + "/" + name
}

// Args are the arguments that give the same criteria on another machine, or later.
func (o *Flags) Args() ([]string, error) {
	args, err := o.otherArgs()
	for _, c := range o.criteria {
		args = c.appendTo(args)
	}
	return args, err
}

// ArgsOn are the arguments that give the same criteria on a node of a cluster: a pod of another node is known there by
// its addresses alone. The name stays beside them, because a pod that was called so may have been there before. The
// names of --pod stay alone where one of the pods is, or with --address: criteria of two kinds must both hold.
func (o *Flags) ArgsOn(node string, pods map[string]PodPlace) ([]string, error) {
	args, err := o.otherArgs()
	byAddress := o.podsByAddress(node, pods)
	for _, c := range o.criteria {
		name := c.name
		if name == "pod" {
			name = "address"
		}
		// Of --pod it is one or the other, of --from and --to, which take both, and of what is left out it may be both.
		either := c.name == "pod" && !c.not
		if !either || !byAddress {
			args = c.appendTo(args)
		}
		if either && !byAddress {
			continue
		}
		for _, value := range c.values() {
			if p := pods[c.podName(value)]; p.Node != node {
				for _, a := range p.Addresses {
					args = criterion{c.not, name, a}.appendTo(args)
				}
			}
		}
	}
	return args, err
}

// podsByAddress says that the pods of --pod are all of other nodes, and can be asked for by their addresses.
func (o *Flags) podsByAddress(node string, pods map[string]PodPlace) bool {
	for _, c := range o.criteria {
		switch {
		case c.not:
		case c.name == "address":
			return false
		case c.name == "pod":
			for _, value := range c.values() {
				if p := pods[c.podName(value)]; p.Node == node || len(p.Addresses) == 0 {
					return false
				}
			}
		}
	}
	return true
}

// appendTo adds the flag.
func (c criterion) appendTo(args []string) []string {
	if c.not {
		args = append(args, "--not")
	}
	return append(args, "--"+c.name+"="+c.value)
}

// otherArgs are the arguments beside the criteria.
func (o *Flags) otherArgs() ([]string, error) {
	var args []string
	if o.Follow {
		args = append(args, "--follow")
	}
	if o.Last > 0 {
		args = append(args, "--last="+strconv.FormatUint(uint64(o.Last), 10))
	}
	for _, f := range []struct{ name, text string }{{"--since", o.since}, {"--until", o.until}} {
		// Another machine may be in another time zone; how long ago something was is the same there.
		if _, err := time.ParseDuration(f.text); f.text != "" && err != nil {
			t, err := timeOf(f.name, f.text, time.Now())
			if err != nil {
				return nil, err
			}
			f.text = t.Format(time.RFC3339Nano)
		}
		if f.text != "" {
			args = append(args, f.name+"="+f.text)
		}
	}
	return args, nil
}

const timeForms = "15:04:05, \"2006-01-02 15:04:05\" or 2006-01-02T15:04:05Z"

// timeOf is what a person means by a time: how long ago, or when.
func timeOf(flag, text string, now time.Time) (time.Time, error) {
	if d, err := time.ParseDuration(text); err == nil {
		if d < 0 {
			return now, invocation.Usagef("%s: %s is negative", flag, text)
		}
		return now.Add(-d), nil
	}
	if t, err := time.Parse(time.RFC3339Nano, text); err == nil {
		return t, nil
	}
	for _, form := range []string{"2006-01-02 15:04:05", "2006-01-02T15:04:05", "2006-01-02"} {
		if t, err := time.ParseInLocation(form, text, now.Location()); err == nil {
			return t, nil
		}
	}
	for _, form := range []string{"15:04:05", "15:04"} {
		if t, err := time.ParseInLocation(form, text, now.Location()); err == nil {
			y, m, d := now.Date()
			return time.Date(y, m, d, t.Hour(), t.Minute(), t.Second(), t.Nanosecond(), now.Location()), nil
		}
	}
	return now, invocation.Usagef("%s: %q is neither how long ago, such as 1m, nor a time such as %s", flag, text,
		timeForms)
}

// Until is the end of what is asked for, if there is one.
func (o *Flags) Until(now time.Time) (t time.Time, ok bool, err error) {
	if o.until == "" {
		return t, false, nil
	}
	t, err = timeOf("--until", o.until, now)
	return t, true, err
}

// request is what the datapath is asked for. Without n, names stay as they are.
func (o *Flags) request(now time.Time, n *names) (*datapathv1.ObserveRequest, error) {
	req := &datapathv1.ObserveRequest{Follow: o.Follow, Last: uint32(o.Last)}
	if o.Last > 4096 {
		return nil, invocation.Usagef("--last: %d is more than the 4096 that are remembered", o.Last)
	}
	if o.not {
		return nil, invocation.Usagef("--not: no criterion follows it")
	}
	if o.since != "" {
		t, err := timeOf("--since", o.since, now)
		if err != nil {
			return nil, err
		}
		req.Since = timestamppb.New(t)
	}
	if t, ok, err := o.Until(now); err != nil {
		return nil, err
	} else if ok {
		req.Until = timestamppb.New(t)
		if req.Since != nil && t.Before(req.GetSince().AsTime()) {
			return nil, invocation.Usagef("--until: it is before --since")
		}
	}
	if err := o.checkFile(); err != nil {
		return nil, err
	}
	all := &datapathv1.FlowCriteria{}
	for _, c := range o.criteria {
		to := all
		if c.not {
			to = &datapathv1.FlowCriteria{}
			req.Excluded = append(req.Excluded, to)
		}
		if err := c.addTo(to, n); err != nil {
			return nil, err
		}
	}
	req.Owners, req.Pods, req.Identities, req.Prefixes = all.GetOwners(), all.GetPods(), all.GetIdentities(),
		all.GetPrefixes()
	req.Reasons, req.Direction, req.Protocols, req.Ports = all.GetReasons(), all.GetDirection(), all.GetProtocols(),
		all.GetPorts()
	req.Verdicts, req.Types, req.Selectors = all.GetVerdicts(), all.GetTypes(), all.GetSelectors()
	req.Services, req.Source, req.Destination = all.GetServices(), all.GetSource(), all.GetDestination()
	return req, nil
}

func (c criterion) addTo(to *datapathv1.FlowCriteria, n *names) error {
	add := c.kind().add
	for _, value := range c.values() {
		if strings.TrimSpace(value) == "" {
			return invocation.Usagef("--%s: an empty value", c.name)
		}
		if err := add(to, strings.TrimSpace(value), n); err != nil {
			return err
		}
	}
	return nil
}

func sourceOf(c *datapathv1.FlowCriteria) *datapathv1.FlowEndCriteria {
	if c.Source == nil {
		c.Source = &datapathv1.FlowEndCriteria{}
	}
	return c.Source
}

func destinationOf(c *datapathv1.FlowCriteria) *datapathv1.FlowEndCriteria {
	if c.Destination == nil {
		c.Destination = &datapathv1.FlowEndCriteria{}
	}
	return c.Destination
}

// addEnd adds what a person calls one end of a flow.
func addEnd(to *datapathv1.FlowEndCriteria, flag, value string, n *names) error {
	if p, err := flagvalue.Prefix(flag, value); err == nil {
		to.Prefixes = append(to.Prefixes, p.String())
		return nil
	}
	if _, err := netip.ParseAddrPort(value); err == nil {
		return invocation.Usagef("%s: %q has a port; give the address here, and the port with %s-port", flag, value, flag)
	}
	// As policy explain reads it: the start of an id that has only digits is given up to its first letter.
	if _, err := strconv.ParseUint(value, 10, 64); err == nil && len(value) <= 8 && value[0] != '0' {
		n, err := identityOf(flag, value)
		to.Identities = append(to.Identities, n)
		return err
	}
	if strings.ContainsAny(value, "=!(,: ") {
		sel, err := selector.Parse(value)
		if err != nil {
			return invocation.Usagef("%s: %w", flag, err)
		}
		to.Selectors = append(to.Selectors, sel)
		return nil
	}
	owners, pods, err := n.end(flag, value)
	to.Owners, to.Pods = append(to.Owners, owners...), append(to.Pods, pods...)
	return err
}

func addContainer(c *datapathv1.FlowCriteria, value string, n *names) error {
	o, err := n.container("--container", value)
	c.Owners = append(c.Owners, o)
	return err
}

func addPod(c *datapathv1.FlowCriteria, value string, n *names) error {
	p, err := n.pod("--pod", value)
	c.Pods = append(c.Pods, p)
	return err
}

func addPort(to *[]uint32, flag, value string) error {
	p, err := flagvalue.Port(flag, value)
	*to = append(*to, uint32(p))
	return err
}

func identityOf(flag, value string) (uint32, error) {
	n, err := strconv.ParseUint(value, 10, 32)
	if err != nil || n == 0 || n > uint64(identity.Max) {
		return 0, invocation.Usagef("%s: %q is not an identity", flag, value)
	}
	return uint32(n), nil
}

func addDirection(c *datapathv1.FlowCriteria, value string, _ *names) error {
	switch value {
	case "egress":
		c.Direction = netv1.Direction_DIRECTION_EGRESS
	case "ingress":
		c.Direction = netv1.Direction_DIRECTION_INGRESS
	default:
		return invocation.Usagef("--direction: %q is neither egress nor ingress", value)
	}
	return nil
}

func addProtocol(c *datapathv1.FlowCriteria, value string, _ *names) error {
	n, err := flagvalue.Protocol("--protocol", value)
	c.Protocols = append(c.Protocols, netv1.Protocol(n))
	return err
}

func addLabel(c *datapathv1.FlowCriteria, value string, _ *names) error {
	sel, err := selector.Parse(value)
	if err != nil {
		return invocation.Usagef("--label: %w", err)
	}
	c.Selectors = append(c.Selectors, sel)
	return nil
}

func addService(c *datapathv1.FlowCriteria, value string, _ *names) error {
	key, err := service.Named(value, "")
	if err != nil {
		return invocation.Usagef("--service: %w", err)
	}
	c.Services = append(c.Services, &datapathv1.ServiceName{Namespace: key.GetNamespace(), Name: key.GetName()})
	return nil
}

func addReason(c *datapathv1.FlowCriteria, value string, _ *names) error {
	r, err := enumNamed[datapathv1.Reason]("--reason", value, "REASON_", datapathv1.Reason_value)
	c.Reasons = append(c.Reasons, r)
	return err
}

func addVerdict(c *datapathv1.FlowCriteria, value string, _ *names) error {
	v, err := enumNamed[datapathv1.Verdict]("--verdict", value, "VERDICT_", datapathv1.Verdict_value)
	c.Verdicts = append(c.Verdicts, v)
	return err
}

func addType(c *datapathv1.FlowCriteria, value string, _ *names) error {
	t, err := enumNamed[datapathv1.FlowType]("--type", value, "FLOW_TYPE_", datapathv1.FlowType_value)
	c.Types = append(c.Types, t)
	return err
}

// enumNamed finds a value by its last words, in lower case with "-".
func enumNamed[E ~int32](flag, text, prefix string, values map[string]int32) (E, error) {
	n, ok := values[prefix+strings.ToUpper(strings.ReplaceAll(text, "-", "_"))]
	if ok && n != 0 {
		return E(n), nil
	}
	return 0, invocation.Usagef("%s: %q is not one of %s", flag, text, strings.Join(enumNames(prefix, values), ", "))
}

// enumNames are what a person may call the values.
func enumNames(prefix string, values map[string]int32) []string {
	var texts []string
	for name, n := range values {
		if n != 0 {
			texts = append(texts, strings.ToLower(strings.ReplaceAll(strings.TrimPrefix(name, prefix), "_", "-")))
		}
	}
	slices.Sort(texts)
	return texts
}

// flagsOf are the flags by the field of the request.
var flagsOf = map[string]string{
	"since": "--since", "owners": "--container", "identities": "--identity", "prefixes": "--address",
	"reasons": "--reason", "direction": "--direction",
	"protocols": "--protocol", "ports": "--port", "selectors": "--label", "verdicts": "--verdict", "types": "--type",
	"services": "--service", "pods": "--pod", "source": "--from", "destination": "--to", "excluded": "--not",
	"until": "--until", "last": "--last",
}

// inFlags names the flags of the fields that the service found mistakes in.
func inFlags(err error) error {
	var lines []string
	for _, v := range rpcerr.Fields(err) {
		name := v.GetField()
		if i := strings.IndexAny(name, "[."); i >= 0 {
			name = name[:i]
		}
		flag, ok := flagsOf[name]
		if !ok {
			return err
		}
		lines = append(lines, flag+": "+strings.TrimPrefix(v.GetDescription(), v.GetField()+": "))
	}
	if len(lines) == 0 {
		return err
	}
	return invocation.Usagef("%s", strings.Join(lines, "\n"))
}

// names finds the containers and pods that a person means. A nil one takes the text for the name.
type names struct {
	list func() ([]*datapathv1.Endpoint, error)
	note func(text string)

	all    []*datapathv1.Endpoint
	listed bool
}

func (n *names) endpoints() ([]*datapathv1.Endpoint, error) {
	if n == nil || n.listed {
		if n == nil {
			return nil, nil
		}
		return n.all, nil
	}
	var err error
	n.all, err = n.list()
	n.listed = err == nil
	return n.all, err
}

// missing notes that nothing has a name now. It may have gone, or may come.
func (n *names) missing(flag, what, name string) {
	if n != nil {
		n.note(flag + " " + name + ": no " + what +
			" of this node is called so now; events of one that has gone, or comes, are shown")
	}
}

func (n *names) container(flag, name string) (*workloadv1.Owner, error) {
	all, err := n.endpoints()
	if err != nil {
		return nil, err
	}
	e, err := endpoint.Match(all, name)
	switch {
	case err != nil:
		return nil, invocation.Usagef("%s: %w", flag, err)
	case e != nil:
		return e.GetOwner(), nil
	}
	n.missing(flag, "container", name)
	return ownerNamed(name), nil
}

// ownerNamed takes the text for a whole name.
func ownerNamed(name string) *workloadv1.Owner {
	id, ifname, found := strings.Cut(name, "/")
	if !found {
		ifname = "eth0"
	}
	return &workloadv1.Owner{ContainerId: id, InterfaceName: ifname}
}

func (n *names) pod(flag, name string) (*datapathv1.PodName, error) {
	namespace, pod, found := strings.Cut(name, "/")
	if !found {
		namespace, pod = "default", name
	}
	if namespace == "" || pod == "" || strings.Contains(pod, "/") {
		return nil, invocation.Usagef("%s: %q is not [NAMESPACE/]NAME", flag, name)
	}
	all, err := n.endpoints()
	if err != nil {
		return nil, err
	}
	if !hasPod(all, namespace, pod) {
		n.missing(flag, "pod", namespace+"/"+pod)
	}
	return &datapathv1.PodName{Namespace: namespace, Name: pod}, nil
}

func hasPod(all []*datapathv1.Endpoint, namespace, name string) bool {
	return slices.ContainsFunc(all, func(e *datapathv1.Endpoint) bool {
		return e.GetPod() != nil && e.GetPod().GetNamespace() == namespace && e.GetPod().GetName() == name
	})
}

// end finds a container or a pod. What is neither now may be one or the other.
func (n *names) end(flag, name string) ([]*workloadv1.Owner, []*datapathv1.PodName, error) {
	all, err := n.endpoints()
	if err != nil {
		return nil, nil, err
	}
	namespace, podName, slash := strings.Cut(name, "/")
	if namespace == "" || slash && (podName == "" || strings.Contains(podName, "/")) {
		return nil, nil, invocation.Usagef("%s: %q is neither CONTAINER, CONTAINER/INTERFACE nor the pod NAMESPACE/NAME",
			flag, name)
	}
	pods := []*datapathv1.PodName{{Namespace: namespace, Name: podName}}
	if slash && hasPod(all, namespace, podName) {
		return nil, pods, nil
	}
	e, err := endpoint.Match(all, name)
	switch {
	case err != nil:
		return nil, nil, invocation.Usagef("%s: %w", flag, err)
	case e != nil:
		return []*workloadv1.Owner{e.GetOwner()}, nil, nil
	}
	n.missing(flag, "container or pod", name)
	if !slash {
		return []*workloadv1.Owner{ownerNamed(name)}, nil, nil
	}
	if len(podName) > 15 { // longer than the name of an interface
		return nil, pods, nil
	}
	return []*workloadv1.Owner{ownerNamed(name)}, pods, nil
}
