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

// Flags contains the filters and the output options of `observe`, as given on the command line.
type Flags struct {
	Follow bool // also show new events
	Last   uint // the number of stored events to show; 0: all

	since, until string
	file         string
	fileSize     invocation.Size
	files        uint
	criteria     []criterion // in order of the command line
	not          bool        // --not precedes the next criterion
}

// criterion is one filter flag with its value.
type criterion struct {
	not         bool
	name, value string
}

// kind describes a filter flag.
type kind struct {
	name   string
	commas bool // the flag takes several values separated by commas
	help   string
	add    func(to *datapathv1.FlowCriteria, value string, n *names) error
}

// kindFlag is the pflag.Value of a kind.
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

// values returns the values of a criterion.
func (c criterion) values() []string {
	if c.kind().commas {
		return strings.Split(c.value, ",")
	}
	return []string{c.value}
}

// kinds are the filters of `observe` and `kubernetes observe`.
var kinds = []kind{
	{
		"container", true,
		"events of the container CONTAINER[/INTERFACE] or the pod NAMESPACE/NAME",
		addContainer,
	},
	{"pod", true, "events of the pod [NAMESPACE/]NAME of this node", addPod},
	{
		"from", false, "events with this sender: a container, pod, address, prefix, identity or label selector",
		func(c *datapathv1.FlowCriteria, value string, n *names) error {
			return addEnd(sourceOf(c), "--from", value, n)
		},
	},
	{
		"to", false, "events with this receiver; the same forms as --from",
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
		"to-port", true, "events with this destination port, before or after service translation",
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
		"address", true, "events with an address in this prefix on either side, before or after service translation",
		func(c *datapathv1.FlowCriteria, value string, _ *names) error {
			p, err := flagvalue.Prefix("--address", value)
			c.Prefixes = append(c.Prefixes, p.String())
			return err
		},
	},
	{"reason", true, "events with this reason, for example spoofed-ip", addReason},
	{"direction", false, "egress or ingress, from the view of the container", addDirection},
	{"protocol", true, "tcp, udp, sctp, icmp, icmpv6 or a number", addProtocol},
	{
		"port", true, "events with this port on either side, before or after service translation",
		func(c *datapathv1.FlowCriteria, value string, _ *names) error {
			return addPort(&c.Ports, "--port", value)
		},
	},
	{
		"label", false,
		"events with a pod on either side that this label selector matches: app=web,tier in (a,b),!x; may be repeated",
		addLabel,
	},
	{
		"service", true,
		"events of packets to the service [NAMESPACE/]NAME, and to its backends unless sent to another service",
		addService,
	},
	{"verdict", true, "forwarded, dropped, audited or redirected", addVerdict},
	{"type", true, "drop, policy-verdict or connection-closed", addType},
}

// Check checks the filters, but not the names of containers and pods.
func (o *Flags) Check() error {
	_, err := o.request(time.Now(), nil)
	return err
}

// Add adds the flags to a command.
func (o *Flags) Add(f *pflag.FlagSet) {
	f.BoolVarP(&o.Follow, "follow", "f", false, "also show new events, until interrupted")
	f.StringVar(&o.since, "since", "",
		"show events since this long ago, for example 1m, or since a time: "+timeForms)
	f.StringVar(&o.until, "until", "",
		"show events until this long ago, or until a time, as in --since; also ends --follow")
	f.UintVar(&o.Last, "last", 0, "show only the latest N of the stored events that meet the filters, at most 4096")
	for _, k := range kinds {
		f.Var(kindFlag{k, o}, k.name, k.help)
	}
	f.BoolVar(&o.not, "not", false, "invert the next filter")
	o.addFile(f)
}

// PodPlace is the node of a pod and the addresses by which other nodes know it.
type PodPlace struct {
	Node      string
	Addresses []string
}

// PodNames returns the distinct values of the filters that have the form NAMESPACE/NAME. Such a value of --from or --to
// may also mean CONTAINER/INTERFACE.
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

// podName returns the value as NAMESPACE/NAME if it may be the name of a pod, else an empty string.
func (c criterion) podName(value string) string {
	value = strings.TrimSpace(value)
	if c.name == "from" || c.name == "to" {
		value = strings.TrimPrefix(value, "pod:")
	}
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

// Args returns arguments for the same filters on another machine or at a later time.
func (o *Flags) Args() ([]string, error) {
	args, err := o.otherArgs()
	for _, c := range o.criteria {
		args = c.appendTo(args)
	}
	return args, err
}

// ArgsOn returns arguments for the same filters on a node of a cluster. A node knows the pods of other nodes only by
// their addresses, so ArgsOn adds the addresses. It keeps the names, because a pod of the same name may have been on
// the node earlier. An event must match the filters of every kind. Therefore ArgsOn replaces --pod by --address only if
// all pods of --pod are on other nodes and the user has not given --address.
func (o *Flags) ArgsOn(node string, pods map[string]PodPlace) ([]string, error) {
	args, err := o.otherArgs()
	byAddress := o.podsByAddress(node, pods)
	for _, c := range o.criteria {
		name := c.name
		if name == "pod" {
			name = "address"
		}
		// --pod becomes either names or addresses. --from, --to and inverted filters may contain both.
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

// podsByAddress reports whether all pods of --pod are on other nodes and can be selected by address.
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

// appendTo appends the criterion as a flag.
func (c criterion) appendTo(args []string) []string {
	if c.not {
		args = append(args, "--not")
	}
	return append(args, "--"+c.name+"="+c.value)
}

// otherArgs returns the arguments other than filters.
func (o *Flags) otherArgs() ([]string, error) {
	var args []string
	if o.Follow {
		args = append(args, "--follow")
	}
	if o.Last > 0 {
		args = append(args, "--last="+strconv.FormatUint(uint64(o.Last), 10))
	}
	for _, f := range []struct{ name, text string }{{"--since", o.since}, {"--until", o.until}} {
		// The other machine may be in another time zone, so times become absolute. Durations stay.
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

// timeOf parses a duration before now, or a time.
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
	return now, invocation.Usagef("%s: %q is neither a duration such as 1m nor a time such as %s", flag, text,
		timeForms)
}

// Until returns the time of --until; ok is false if the flag is not set.
func (o *Flags) Until(now time.Time) (t time.Time, ok bool, err error) {
	if o.until == "" {
		return t, false, nil
	}
	t, err = timeOf("--until", o.until, now)
	return t, true, err
}

// request returns the request for the datapath. With n == nil, it does not resolve names.
func (o *Flags) request(now time.Time, n *names) (*datapathv1.ObserveRequest, error) {
	req := &datapathv1.ObserveRequest{Follow: o.Follow, Last: uint32(o.Last)}
	if o.Last > 4096 {
		return nil, invocation.Usagef("--last: %d is more than 4096, the largest number of stored events", o.Last)
	}
	if o.not {
		return nil, invocation.Usagef("--not: no filter follows")
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
			return nil, invocation.Usagef("--until is before --since")
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

// addEnd adds the value of --from or --to.
func addEnd(to *datapathv1.FlowEndCriteria, flag, value string, n *names) error {
	if p, err := flagvalue.Prefix(flag, value); err == nil {
		to.Prefixes = append(to.Prefixes, p.String())
		return nil
	}
	if _, err := netip.ParseAddrPort(value); err == nil {
		return invocation.Usagef("%s: %q has a port; give the address here, and the port with %s-port", flag, value, flag)
	}
	// A number is an identity, as in `policy explain`. To name a container whose ID begins with digits, give the ID up
	// to its first letter.
	if _, err := strconv.ParseUint(value, 10, 64); err == nil && len(value) <= 8 && value[0] != '0' {
		n, err := identityOf(flag, value)
		to.Identities = append(to.Identities, n)
		return err
	}
	if strings.ContainsAny(value, "=!(,: ") && !endpoint.HasPrefix(value) {
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

// enumNamed returns the value of an enum with a name such as "policy-denied".
func enumNamed[E ~int32](flag, text, prefix string, values map[string]int32) (E, error) {
	n, ok := values[prefix+strings.ToUpper(strings.ReplaceAll(text, "-", "_"))]
	if ok && n != 0 {
		return E(n), nil
	}
	names := enumNames(prefix, values)
	return 0, invocation.NotOneOf(flag, text, names)
}

// enumNames returns the accepted names of an enum, sorted.
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

// flagsOf maps fields of the request to flags.
var flagsOf = map[string]string{
	"since": "--since", "owners": "--container", "identities": "--identity", "prefixes": "--address",
	"reasons": "--reason", "direction": "--direction",
	"protocols": "--protocol", "ports": "--port", "selectors": "--label", "verdicts": "--verdict", "types": "--type",
	"services": "--service", "pods": "--pod", "source": "--from", "destination": "--to", "excluded": "--not",
	"until": "--until", "last": "--last",
}

// inFlags replaces the fields in a service's validation errors by the flags.
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

// names resolves names of containers and pods. A nil value accepts every name.
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

// missing prints a note that no container or pod of this name exists at present. It may have existed earlier, or may be
// created later.
func (n *names) missing(flag, what, name string) {
	if n != nil {
		n.note(flag + " " + name + ": no " + what +
			" of this node has this name now; the filter still matches earlier and later ones")
	}
}

func (n *names) container(flag, name string) (*workloadv1.Owner, error) {
	all, err := n.endpoints()
	if err != nil {
		return nil, err
	}
	parsed, err := endpoint.ParseName(name)
	if err != nil {
		return nil, invocation.Usagef("%s: %w", flag, err)
	}
	e, err := parsed.Match(all)
	switch owner := parsed.Owner(); {
	case err != nil:
		return nil, invocation.Usagef("%s: %w", flag, err)
	case e != nil:
		return e.GetOwner(), nil
	case owner == nil && n != nil:
		return nil, invocation.Usagef("%s: no pod %q on this node; --pod also accepts pods that were deleted or do "+
			"not exist yet", flag, name)
	default:
		n.missing(flag, "container", name)
		return owner, nil
	}
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

// end resolves a container or a pod. If neither exists at present, it returns both.
func (n *names) end(flag, name string) ([]*workloadv1.Owner, []*datapathv1.PodName, error) {
	all, err := n.endpoints()
	if err != nil {
		return nil, nil, err
	}
	parsed, err := endpoint.ParseName(name)
	if err != nil {
		return nil, nil, invocation.Usagef("%s: %w", flag, err)
	}
	var pods []*datapathv1.PodName
	if p := parsed.Pod(); p != nil {
		pods = append(pods, p)
	}
	found, isPod, err := parsed.Find(all)
	switch {
	case err != nil:
		return nil, nil, invocation.Usagef("%s: %w", flag, err)
	case isPod:
		return nil, pods, nil
	case len(found) > 0:
		e, err := parsed.Match(all)
		if err != nil {
			return nil, nil, invocation.Usagef("%s: %w", flag, err)
		}
		return []*workloadv1.Owner{e.GetOwner()}, nil, nil
	}
	n.missing(flag, "container or pod", name)
	if o := parsed.Owner(); o != nil {
		return []*workloadv1.Owner{o}, pods, nil
	}
	return nil, pods, nil
}
