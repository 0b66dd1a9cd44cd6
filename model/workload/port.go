// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package workload

import (
	"cmp"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strconv"
	"strings"

	"github.com/sluice-net/sluice/model/label"
)

// Protocol is the IP protocol number of a transport protocol that has ports.
type Protocol uint8

// Protocols.
const (
	TCP  Protocol = 6
	UDP  Protocol = 17
	SCTP Protocol = 132
)

// String is the name of the protocol, or its number.
func (p Protocol) String() string {
	switch p {
	case TCP:
		return "TCP"
	case UDP:
		return "UDP"
	case SCTP:
		return "SCTP"
	}
	return strconv.Itoa(int(p))
}

func parseProtocol(s string) (Protocol, bool) {
	for _, p := range []Protocol{TCP, UDP, SCTP} {
		if s == p.String() {
			return p, true
		}
	}
	return 0, false
}

// NamedPort is a port that policies may refer to by name. Records of endpoints contain its JSON form.
type NamedPort struct {
	Name     string   `json:"name"` // RFC 6335: 1 to 15 of a-z, 0-9 and "-"; case-sensitive
	Port     uint16   `json:"port"` // not 0
	Protocol Protocol `json:"protocol"`
}

// Compare orders by name, port and protocol, which is the order of ports in records of endpoints.
func (p NamedPort) Compare(q NamedPort) int {
	return cmp.Or(strings.Compare(p.Name, q.Name), cmp.Compare(p.Port, q.Port), cmp.Compare(p.Protocol, q.Protocol))
}

// KeyNamedPorts is the key of the label that carries the named ports of a workload, under label.SourceGenerated.
// Rules may refer to a port by name, so workloads with equal labels but different ports need different identities.
const KeyNamedPorts = "named-ports"

// MaxNamedPorts limits the named ports of an endpoint.
const MaxNamedPorts = 256

// ErrNamedPort is wrapped by every error about a named port.
var ErrNamedPort = errors.New("invalid named port")

// isPortName reports whether s is 1 to 15 of a-z, 0-9 and "-", with no "-" at either end.
func isPortName(s string) bool {
	for i := range len(s) {
		if edge := i == 0 || i == len(s)-1; (!alphanumeric(s[i]) || s[i] >= 'A' && s[i] <= 'Z') && (edge || s[i] != '-') {
			return false
		}
	}
	return s != "" && len(s) <= 15
}

// NamedPortsLabel returns the hidden label of some named ports, sorted and deduplicated: "dns.UDP.53_http.TCP.80". ok
// is false if ports is empty.
func NamedPortsLabel(ports []NamedPort) (l label.Label, ok bool, err error) {
	if len(ports) == 0 {
		return label.Label{}, false, nil
	}
	bad := func(format string, args ...any) (label.Label, bool, error) {
		return label.Label{}, false, fmt.Errorf("%w: "+format, append([]any{ErrNamedPort}, args...)...)
	}
	for i, p := range ports {
		_, known := parseProtocol(p.Protocol.String())
		switch {
		case !isPortName(p.Name):
			return bad("named_ports[%d].name: %q: want 1 to 15 of a-z, 0-9 and \"-\"", i, p.Name)
		case p.Port == 0:
			return bad("named_ports[%d].port: 0 is not a valid port", i)
		case !known:
			return bad("named_ports[%d].protocol: %q has no ports", i, p.Protocol)
		}
	}
	value := NamedPortsText(ports)
	if len(value) > label.MaxValue {
		return bad("named_ports: %d bytes together, at most %d are allowed", len(value), label.MaxValue)
	}
	return label.Label{Source: label.SourceGenerated, Key: KeyNamedPorts, Value: value}, true, nil
}

// FitNamedPorts returns the named ports that fit into one label: the valid ports, in the order of the label, up to
// MaxNamedPorts and the maximum length of a label. Equal ports give equal results. left is the number of ports left
// out.
func FitNamedPorts(ports []NamedPort) (kept []NamedPort, left int) {
	texts := make(map[string]NamedPort, len(ports))
	for _, p := range ports {
		if _, _, err := NamedPortsLabel([]NamedPort{p}); err == nil {
			texts[NamedPortsText([]NamedPort{p})] = p
		} else {
			left++
		}
	}
	length := 0
	for _, text := range slices.Sorted(maps.Keys(texts)) {
		if length += len(text); length > label.MaxValue || len(kept) == MaxNamedPorts {
			left += len(texts) - len(kept)
			break
		}
		length++ // the separator
		kept = append(kept, texts[text])
	}
	return kept, left
}

// NamedPortsText returns the value of the label. The ports must be valid.
func NamedPortsText(ports []NamedPort) string {
	texts := make([]string, len(ports))
	for i, p := range ports {
		texts[i] = p.Name + "." + p.Protocol.String() + "." + strconv.Itoa(int(p.Port))
	}
	// Stored label sets have the order of the texts, not the order of the ports.
	slices.Sort(texts)
	return strings.Join(slices.Compact(texts), "_")
}

// NamedPortsOf reads the named ports from the label that NamedPortsLabel makes, sorted by Compare.
func NamedPortsOf(labels label.Set) ([]NamedPort, error) {
	value, ok := labels.Value(label.SourceGenerated, KeyNamedPorts)
	if !ok {
		return nil, nil
	}
	bad := func(format string, args ...any) error {
		args = append([]any{ErrNamedPort, label.SourceGenerated, KeyNamedPorts}, args...)
		return fmt.Errorf("%w: label %s:%s: "+format, args...)
	}
	if len(value) > label.MaxValue {
		return nil, bad("%d bytes, at most %d are allowed", len(value), label.MaxValue)
	}
	var ports []NamedPort
	for part := range strings.SplitSeq(value, "_") {
		f := strings.Split(part, ".")
		if len(f) != 3 || !isPortName(f[0]) {
			return nil, bad("%q is not NAME.PROTOCOL.PORT", part)
		}
		proto, ok := parseProtocol(f[1])
		if !ok {
			return nil, bad("%q: unknown protocol %q", part, f[1])
		}
		n, err := strconv.ParseUint(f[2], 10, 16)
		if err != nil || n == 0 {
			return nil, bad("%q: port %q is not a number from 1 to 65535", part, f[2])
		}
		ports = append(ports, NamedPort{Name: f[0], Protocol: proto, Port: uint16(n)})
	}
	slices.SortFunc(ports, NamedPort.Compare)
	return slices.Compact(ports), nil
}
