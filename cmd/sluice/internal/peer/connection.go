// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package peer

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"github.com/sluice-net/sluice/cmd/sluice/internal/invocation"
	"github.com/sluice-net/sluice/cmd/sluice/internal/ports"
)

// Connection is the connection that `explain` evaluates.
type Connection struct {
	From, To   Peer
	V6         bool
	Protocol   uint32
	SourcePort uint32
	Port       uint32 // type << 8 | code for ICMP
}

// Flags are the values of the flags that describe a connection.
type Flags struct {
	from, to, port, icmp, protocol, namespace string
	SourcePort                                uint
	v6                                        bool
}

// Add adds the flags that describe a connection to a command.
func (o *Flags) Add(cmd *cobra.Command) {
	f := cmd.Flags()
	f.StringVar(&o.from, "from", "", "initiator of the connection: "+Forms)
	f.StringVar(&o.to, "to", "", "responder of the connection; the same forms as --from")
	f.StringVarP(&o.namespace, "namespace", "n", "", "namespace of pods that are given by labels")
	o.AddService(f)
}

// AddService adds only the flags for the protocol and the port.
func (o *Flags) AddService(f *pflag.FlagSet) {
	f.StringVar(&o.port, "port", "", "destination port, such as 80, 80/tcp, 53/udp or 5000/sctp")
	f.StringVar(&o.icmp, "icmp", "",
		"ICMP TYPE, TYPE/CODE or \"echo\" instead of a port; ICMPv6 if the addresses are IPv6")
	f.StringVar(&o.protocol, "protocol", "",
		"IP protocol number, for protocols other than TCP, UDP, SCTP and ICMP; replaces --port")
	f.BoolVarP(&o.v6, "ipv6", "6", false, "use the IPv6 addresses of pods that have both families")
}

// AddSourcePort adds the flag for the source port.
func (o *Flags) AddSourcePort(f *pflag.FlagSet) {
	f.UintVar(&o.SourcePort, "source-port", 0,
		"source port (ICMP: identifier) of an existing connection whose state is shown")
}

// SetDefaultPort sets --port, unless a port, an ICMP type or a protocol is given.
func (o *Flags) SetDefaultPort(port string) {
	if o.port == "" && o.icmp == "" && o.protocol == "" {
		o.port = port
	}
}

// ResolveConnection resolves both ends and checks that they have addresses of the same family.
func ResolveConnection(ctx context.Context, inv *invocation.Invocation, o Flags, resolve Resolver) (Connection, error) {
	var conn Connection
	for _, end := range []struct {
		flag, text string
		into       *Peer
	}{{"--from", o.from, &conn.From}, {"--to", o.to, &conn.To}} {
		if end.text == "" {
			return conn, invocation.Usagef("%s is missing: want %s", end.flag, Forms)
		}
		p, err := resolve(ctx, inv, end.text, o.namespace)
		if _, ok := errors.AsType[*invocation.UsageError](err); ok {
			return conn, invocation.Usagef("%s: %w", end.flag, err)
		}
		if err != nil {
			return conn, err
		}
		*end.into = p
	}
	return conn, o.Complete(&conn)
}

// Ends returns both ends as given, with the namespace of --namespace added to labels.
func (o Flags) Ends() (from, to string, err error) {
	ends := []string{o.from, o.to}
	for i, text := range ends {
		switch {
		case text == "":
			return "", "", invocation.Usagef("%s is missing: want %s", []string{"--from", "--to"}[i], Forms)
		case o.namespace != "" && IsLabels(text):
			ends[i] = text + ",k8s:io.kubernetes.pod.namespace=" + o.namespace
		}
	}
	return ends[0], ends[1], nil
}

// Complete chooses the address family and sets the protocol and the ports. From and To are already set.
func (o Flags) Complete(conn *Connection) (err error) {
	if conn.V6, err = family(conn.From, conn.To, o.v6); err != nil {
		return err
	}
	if conn.Protocol, conn.Port, err = o.service(conn.V6); err != nil {
		return err
	}
	if o.SourcePort > 65535 {
		return invocation.Usagef("--source-port: %d is not a port", o.SourcePort)
	}
	conn.SourcePort = uint32(o.SourcePort)
	return nil
}

// ServiceArgs returns flags for the protocol and the ports of the connection. A port other than 0 replaces the
// destination port.
func (c Connection) ServiceArgs(port uint32) (args []string) {
	switch {
	case ports.HasPorts(c.Protocol):
		args = []string{fmt.Sprintf("--port=%d/%s", cmp.Or(port, c.Port), ports.ProtocolText(c.Protocol))}
	case ports.IsICMP(c.Protocol):
		args = []string{fmt.Sprintf("--icmp=%d/%d", c.Port>>8, c.Port&0xff)}
	default:
		args = []string{fmt.Sprintf("--protocol=%d", c.Protocol)}
	}
	if c.SourcePort != 0 {
		args = append(args, fmt.Sprintf("--source-port=%d", c.SourcePort))
	}
	return args
}

// Notes returns the notes of both ends.
func (c Connection) Notes() (notes []string) {
	for _, p := range []Peer{c.From, c.To} {
		if p.Note != "" && !slices.Contains(notes, p.Note) {
			notes = append(notes, p.Note)
		}
	}
	return notes
}

// NotAsked is a node that was not asked although it has an end of the connection and enforces policies for it.
type NotAsked struct {
	Node string `json:"node"`
	Has  string `json:"has"` // "sender", "receiver" or "sender and receiver"
}

// NotAsked returns the other nodes that have an end of the connection.
func (c Connection) NotAsked() []NotAsked { return NotAskedOf(c.From.OtherNode(), c.To.OtherNode()) }

// NotAskedOf returns the nodes of the sender and the receiver. An empty name means the local node.
func NotAskedOf(sender, receiver string) (nodes []NotAsked) {
	switch {
	case sender != "" && sender == receiver:
		return []NotAsked{{sender, "sender and receiver"}}
	case sender != "":
		nodes = append(nodes, NotAsked{sender, "sender"})
	}
	if receiver != "" {
		nodes = append(nodes, NotAsked{receiver, "receiver"})
	}
	return nodes
}

// NotAskedText returns the end of a headline: "; node-b, which has the receiver, was not asked".
func NotAskedText(nodes []NotAsked) (text string) {
	for _, n := range nodes {
		text += fmt.Sprintf("; %s, which has the %s, was not asked", n.Node, n.Has)
	}
	return text
}

// family chooses IPv4 or IPv6. A peer without an address fits both families.
func family(from, to Peer, wantV6 bool) (v6 bool, err error) {
	can := func(p Peer, v6 bool) bool {
		_, ok := p.Address(v6)
		return ok || len(p.Addresses) == 0
	}
	for _, v6 := range []bool{wantV6, !wantV6} {
		if can(from, v6) && can(to, v6) {
			if v6 != wantV6 && wantV6 {
				return false, invocation.Usagef("--ipv6: %s and %s do not both have an IPv6 address", from.Text, to.Text)
			}
			return v6, nil
		}
	}
	return false, invocation.Usagef("%s and %s have no addresses of the same family", from.Text, to.Text)
}

// service returns the protocol and the destination port of the flags.
func (o Flags) service(v6 bool) (protocol, port uint32, err error) {
	given := 0
	for _, s := range []string{o.port, o.icmp, o.protocol} {
		if s != "" {
			given++
		}
	}
	if given != 1 {
		return 0, 0, invocation.Usagef("want one of --port, --icmp and --protocol, for example --port 80/tcp")
	}
	switch {
	case o.port != "":
		number, name, found := strings.Cut(strings.ToLower(o.port), "/")
		if !found {
			name = "tcp"
		}
		protocol, ok := ports.Protocols[name]
		if !ok || !ports.HasPorts(protocol) {
			return 0, 0, invocation.Usagef("--port: %q: the protocol is not tcp, udp or sctp", o.port)
		}
		n, err := strconv.ParseUint(number, 10, 16)
		if err != nil || n == 0 {
			return 0, 0, invocation.Usagef("--port: %q: want 1 to 65535", o.port)
		}
		return protocol, uint32(n), nil
	case o.icmp != "":
		number, code, found := strings.Cut(o.icmp, "/")
		if number == "echo" {
			number = "8"
			if v6 {
				number = "128"
			}
		}
		t, err := strconv.ParseUint(number, 10, 8)
		if err != nil {
			return 0, 0, invocation.Usagef("--icmp: %q: want a type, 0 to 255, TYPE/CODE or echo", o.icmp)
		}
		var cd uint64
		if found {
			if cd, err = strconv.ParseUint(code, 10, 8); err != nil {
				return 0, 0, invocation.Usagef("--icmp: %q: want a code, 0 to 255", o.icmp)
			}
		}
		protocol = ports.Protocols["icmp"]
		if v6 {
			protocol = ports.Protocols["icmpv6"]
		}
		return protocol, uint32(t<<8 | cd), nil
	default:
		n, err := strconv.ParseUint(o.protocol, 10, 8)
		if err != nil || n == 0 {
			return 0, 0, invocation.Usagef("--protocol: %q: want 1 to 255", o.protocol)
		}
		if ports.HasPorts(uint32(n)) || ports.IsICMP(uint32(n)) {
			return 0, 0, invocation.Usagef("--protocol: %s is %s; use --port or --icmp", o.protocol,
				ports.ProtocolText(uint32(n)))
		}
		return uint32(n), 0, nil
	}
}
