// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

// Package observe shows what the eBPF programs report of packets.
package observe

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/netip"
	"os"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"
	"google.golang.org/protobuf/types/known/timestamppb"

	"github.com/sluice-net/sluice/cmd/sluice/internal/endpoint"
	"github.com/sluice-net/sluice/cmd/sluice/internal/invocation"
	"github.com/sluice-net/sluice/cmd/sluice/internal/ports"
	"github.com/sluice-net/sluice/cmd/sluice/internal/selector"
	"github.com/sluice-net/sluice/cmd/sluice/internal/service"
	"github.com/sluice-net/sluice/kit/rpc/rpcerr"
	"github.com/sluice-net/sluice/model/identity"
	datapathv1 "github.com/sluice-net/sluice/proto/gen/sluice/datapath/v1"
	netv1 "github.com/sluice-net/sluice/proto/gen/sluice/net/v1"
	workloadv1 "github.com/sluice-net/sluice/proto/gen/sluice/workload/v1"
)

// Flags are the criteria as given.
type Flags struct {
	Follow bool // stay and show new events

	since      time.Duration
	owners     []string
	identities []uint
	prefixes   []string
	reasons    []string
	direction  string
	protocols  []string
	ports      []uint
	labels     []string
	verdicts   []string
	types      []string
	services   []string
}

// Command is `observe`.
func Command(inv *invocation.Invocation) *cobra.Command {
	var o Flags
	untilInputEnds := false
	cmd := &cobra.Command{
		Use:   "observe",
		Short: "Show what happens to packets",
		Long: `Show what the eBPF programs report: drops with their reason, the policies' verdicts
on connections with the deciding rule, and the ends of connections. Without
--follow it shows what is remembered and ends. Criteria of different kinds must all hold; of
one kind, one must hold. Events that were lost are shown where they are missing.`,
		Args: invocation.Args(0, ""),
		RunE: func(cmd *cobra.Command, _ []string) error {
			req, err := o.request(time.Now())
			if err != nil {
				return err
			}
			if len(o.owners) > 0 {
				if err := completeOwners(cmd.Context(), inv, o.owners, req.GetOwners()); err != nil {
					return err
				}
			}
			ctx := cmd.Context()
			if untilInputEnds {
				var stop func()
				ctx, stop = endWith(ctx, cmd.InOrStdin())
				defer stop()
			}
			return run(ctx, inv, req)
		},
	}
	o.Add(cmd.Flags())
	// A command that kubectl executes in a pod is not told that its caller has ended: its input ends.
	cmd.Flags().BoolVar(&untilInputEnds, UntilInputEnds, false,
		"end when standard input does, for a caller on another machine")
	return cmd
}

// UntilInputEnds is the flag by which an observer ends with its caller.
const UntilInputEnds = "until-input-ends"

// abandoned is how long after the end of its input an observer may still write.
const abandoned = 2 * time.Second

// endWith ends the context when the input ends. The program ends soon after that, unless stop is called before: the
// pipe of a command that kubectl executes in a pod stays open without a reader when kubectl is killed, and a write into
// it would wait forever.
func endWith(ctx context.Context, input io.Reader) (_ context.Context, stop func()) {
	ctx, cancel := context.WithCancel(ctx)
	stopped := make(chan struct{})
	go func() {
		_, _ = io.Copy(io.Discard, input)
		cancel()
		select {
		case <-stopped:
		case <-time.After(abandoned):
			os.Exit(invocation.ExitFailed)
		}
	}()
	return ctx, func() {
		cancel()
		close(stopped)
	}
}

// Check finds mistakes in the criteria.
func (o *Flags) Check() error {
	_, err := o.request(time.Now())
	return err
}

// Add adds the criteria to a command.
func (o *Flags) Add(f *pflag.FlagSet) {
	f.BoolVarP(&o.Follow, "follow", "f", false, "stay and show new events")
	f.DurationVar(&o.since, "since", 0, "begin with events of this long ago, for example 1m")
	f.StringSliceVar(&o.owners, "container", nil,
		"events about CONTAINER or CONTAINER/INTERFACE; of a container that is there, the start of its id is enough")
	f.UintSliceVar(&o.identities, "identity", nil, "events with this identity on either side")
	f.StringSliceVar(&o.prefixes, "address", nil, "events with an address in this prefix on either side, or asked for")
	f.StringSliceVar(&o.reasons, "reason", nil, "events with this reason, for example spoofed-ip")
	f.StringVar(&o.direction, "direction", "", "egress or ingress, seen from the container")
	f.StringSliceVar(&o.protocols, "protocol", nil, "tcp, udp, sctp, icmp, icmpv6 or a number")
	f.UintSliceVar(&o.ports, "port", nil, "events with this port on either side, or asked for")
	f.StringArrayVar(&o.labels, "label", nil,
		"events with a pod of these labels on either side, as kubectl selects: app=web,tier in (a,b),!x; may be repeated")
	f.StringSliceVar(&o.services, "service", nil,
		"events of packets that asked for the service [NAMESPACE/]NAME, before they were led to a backend")
	f.StringSliceVar(&o.verdicts, "verdict", nil, "forwarded, dropped, audited or redirected")
	f.StringSliceVar(&o.types, "type", nil, "drop, policy-verdict or connection-closed")
}

// completeOwners takes the start of a container's id for the container, where
// one of this node begins so. Others may be gone, or may come.
func completeOwners(ctx context.Context, inv *invocation.Invocation, names []string, owners []*workloadv1.Owner) error {
	all, err := endpoint.List(ctx, inv)
	if err != nil {
		return err
	}
	for i, name := range names {
		e, err := endpoint.Match(all, name)
		if err != nil {
			return invocation.Usagef("--container: %w", err)
		}
		if e != nil {
			owners[i] = e.GetOwner()
		}
	}
	return nil
}

// enumNamed finds a value by its last words, in lower case with "-".
func enumNamed[E ~int32](flag, text, prefix string, values map[string]int32) (E, error) {
	n, ok := values[prefix+strings.ToUpper(strings.ReplaceAll(text, "-", "_"))]
	if ok && n != 0 {
		return E(n), nil
	}
	var names []string
	for name, n := range values {
		if n != 0 {
			names = append(names, strings.ToLower(strings.ReplaceAll(strings.TrimPrefix(name, prefix), "_", "-")))
		}
	}
	slices.Sort(names)
	return 0, invocation.Usagef("%s: %q is not one of %s", flag, text, strings.Join(names, ", "))
}

func (o *Flags) request(now time.Time) (*datapathv1.ObserveRequest, error) {
	req := &datapathv1.ObserveRequest{Follow: o.Follow}
	if o.since < 0 {
		return nil, invocation.Usagef("--since: %s is negative", o.since)
	}
	if o.since > 0 {
		req.Since = timestamppb.New(now.Add(-o.since))
	}
	for _, s := range o.owners {
		id, ifname, found := strings.Cut(s, "/")
		if !found {
			ifname = "eth0"
		}
		req.Owners = append(req.Owners, &workloadv1.Owner{ContainerId: id, InterfaceName: ifname})
	}
	for _, n := range o.identities {
		if n == 0 || n > uint(identity.Max) {
			return nil, invocation.Usagef("--identity: %d is not an identity", n)
		}
		req.Identities = append(req.Identities, uint32(n))
	}
	for _, s := range o.prefixes {
		p, err := netip.ParsePrefix(s)
		if err != nil {
			a, aerr := netip.ParseAddr(s)
			if aerr != nil {
				return nil, invocation.Usagef("--address: %q is neither an address nor a prefix", s)
			}
			p = netip.PrefixFrom(a, a.BitLen())
		}
		req.Prefixes = append(req.Prefixes, p.Masked().String())
	}
	switch o.direction {
	case "":
	case "egress":
		req.Direction = netv1.Direction_DIRECTION_EGRESS
	case "ingress":
		req.Direction = netv1.Direction_DIRECTION_INGRESS
	default:
		return nil, invocation.Usagef("--direction: %q is neither egress nor ingress", o.direction)
	}
	for _, s := range o.protocols {
		n, ok := ports.Protocols[strings.ToLower(s)]
		if !ok {
			v, err := strconv.ParseUint(s, 10, 8)
			if err != nil {
				return nil, invocation.Usagef("--protocol: %q is not a protocol", s)
			}
			n = uint32(v)
		}
		req.Protocols = append(req.Protocols, netv1.Protocol(n))
	}
	for _, p := range o.ports {
		if p > 65535 {
			return nil, invocation.Usagef("--port: %d is not a port", p)
		}
		req.Ports = append(req.Ports, uint32(p))
	}
	for _, s := range o.labels {
		if strings.TrimSpace(s) == "" {
			return nil, invocation.Usagef("--label: an empty selector")
		}
		sel, err := selector.Parse(s)
		if err != nil {
			return nil, invocation.Usagef("--label: %w", err)
		}
		req.Selectors = append(req.Selectors, sel)
	}
	for _, s := range o.services {
		key, err := service.Named(s, "")
		if err != nil {
			return nil, invocation.Usagef("--service: %w", err)
		}
		req.Services = append(req.Services, &datapathv1.ServiceName{Namespace: key.GetNamespace(), Name: key.GetName()})
	}
	for _, s := range o.reasons {
		r, err := enumNamed[datapathv1.Reason]("--reason", s, "REASON_", datapathv1.Reason_value)
		if err != nil {
			return nil, err
		}
		req.Reasons = append(req.Reasons, r)
	}
	for _, s := range o.verdicts {
		v, err := enumNamed[datapathv1.Verdict]("--verdict", s, "VERDICT_", datapathv1.Verdict_value)
		if err != nil {
			return nil, err
		}
		req.Verdicts = append(req.Verdicts, v)
	}
	for _, s := range o.types {
		v, err := enumNamed[datapathv1.FlowType]("--type", s, "FLOW_TYPE_", datapathv1.FlowType_value)
		if err != nil {
			return nil, err
		}
		req.Types = append(req.Types, v)
	}
	return req, nil
}

// criteria are the flags by the field of the request.
var criteria = map[string]string{
	"since": "--since", "owners": "--container", "identities": "--identity", "prefixes": "--address",
	"reasons": "--reason", "direction": "--direction",
	"protocols": "--protocol", "ports": "--port", "selectors": "--label", "verdicts": "--verdict", "types": "--type",
	"services": "--service",
}

// inFlags names the flags of the fields that the service found mistakes in.
func inFlags(err error) error {
	var lines []string
	for _, v := range rpcerr.Fields(err) {
		name := v.GetField()
		if i := strings.IndexAny(name, "[."); i >= 0 {
			name = name[:i]
		}
		flag, ok := criteria[name]
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

func run(ctx context.Context, inv *invocation.Invocation, req *datapathv1.ObserveRequest) error {
	conn, err := inv.Dial("datapath")
	if err != nil {
		return err
	}
	defer conn.Close()
	var cancel context.CancelFunc = func() {}
	if !req.GetFollow() {
		ctx, cancel = context.WithTimeout(ctx, inv.Timeout)
	}
	defer cancel()
	stream, err := datapathv1.NewObserverServiceClient(conn).Observe(ctx, req)
	if err != nil {
		return inFlags(err)
	}
	// JSON comes one object a line: a stream has no end to close a list at.
	encoder := json.NewEncoder(inv.Out)
	for {
		m, err := stream.Recv()
		switch {
		case errors.Is(err, io.EOF):
			return nil
		case err != nil && req.GetFollow() && ctx.Err() != nil:
			return nil // the person has seen enough
		case err != nil:
			return inFlags(err)
		}
		f := flowOf(m)
		if inv.Format == "json" {
			err = encoder.Encode(f)
		} else {
			_, err = fmt.Fprintln(inv.Out, f.Line())
		}
		if err != nil {
			return err
		}
	}
}
