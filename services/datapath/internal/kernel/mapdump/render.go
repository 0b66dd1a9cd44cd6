// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package mapdump

import (
	"encoding/hex"
	"fmt"
	"net"
	"net/netip"
	"strconv"
	"strings"

	"github.com/cilium/ebpf/btf"

	"github.com/sluice-net/sluice/services/datapath/internal/endpoint/endpointmap"
	"github.com/sluice-net/sluice/services/datapath/internal/kernel/conntrack"
	"github.com/sluice-net/sluice/services/datapath/internal/kernel/nodetable"
)

// renderer renders a field. It returns false if the field is not to be shown.
type renderer func(b []byte, c context) (text string, ok bool)

// renderer returns the renderer with a name of bpf/include/sluice/describe.h.
func (c compiler) renderer(how string) (renderer, error) {
	switch how {
	case "hidden":
		return func([]byte, context) (string, bool) { return "", false }, nil
	case "number":
		return nonzero(func(b []byte, _ context) string { return fmt.Sprint(number(b)) }), nil
	case "signed":
		return nonzero(func(b []byte, _ context) string { return fmt.Sprint(int32(number(b))) }), nil
	case "be16", "be32":
		return nonzero(func(b []byte, _ context) string {
			n := uint64(0)
			for _, c := range b {
				n = n<<8 | uint64(c)
			}
			return fmt.Sprint(n)
		}), nil
	case "hex":
		return nonzero(func(b []byte, _ context) string {
			if len(b) > 8 {
				return hex.EncodeToString(b)
			}
			return fmt.Sprintf("%#x", number(b))
		}), nil
	case "mac":
		return nonzero(func(b []byte, _ context) string { return net.HardwareAddr(b).String() }), nil
	case "address":
		return nonzero(func(b []byte, _ context) string { return address(b, false).String() }), nil
	case "identity-index":
		return func(b []byte, _ context) (string, bool) {
			return fmt.Sprintf("identity %d", nodetable.IdentityAt(int(number(b)))), true
		}, nil
	case "seconds":
		return nonzero(func(b []byte, c context) string {
			return fmt.Sprintf("%d s ago", int32(c.Now-uint32(number(b))))
		}), nil
	case "node":
		return nonzero(node), nil
	case "endpoint":
		return endpoint, nil
	}
	if name, ok := strings.CutPrefix(how, "enum:"); ok {
		var e *btf.Enum
		if err := c.types.TypeByName(name, &e); err != nil {
			return nil, err
		}
		return names(enumerators(e)), nil
	}
	if text, ok := strings.CutPrefix(how, "unless:"); ok {
		none, err := strconv.ParseUint(text, 10, 64)
		if err != nil {
			return nil, err
		}
		return func(b []byte, _ context) (string, bool) { return fmt.Sprint(number(b)), number(b) != none }, nil
	}
	if strings.Contains(how, "|") {
		words := map[uint64]string{}
		for i, word := range strings.Split(how, "|") {
			words[uint64(i)] = word
		}
		return names(words), nil
	}
	return nil, fmt.Errorf("unknown renderer %q", how)
}

// nonzero omits a field that is zero.
func nonzero(r func(b []byte, c context) string) renderer {
	return func(b []byte, c context) (string, bool) {
		return r(b, c), c.zeros || !zero(b)
	}
}

// names renders numbers by name; "-" is not shown.
func names(words map[uint64]string) renderer {
	return func(b []byte, _ context) (string, bool) {
		word, ok := words[number(b)]
		if !ok {
			word = fmt.Sprint(number(b))
		}
		return word, word != "-"
	}
}

// enumerators returns the names of an enumeration without their common prefix, which is the type's name in
// upper case and an underscore: "SL_REASON_" for sl_reason. Values without the prefix are omitted.
func enumerators(e *btf.Enum) map[uint64]string {
	words := map[uint64]string{}
	prefix := strings.ToUpper(e.Name) + "_"
	for _, v := range e.Values {
		if name, ok := strings.CutPrefix(v.Name, prefix); ok {
			words[v.Value] = strings.ReplaceAll(strings.ToLower(name), "_", "-")
		}
	}
	return words
}

func node(b []byte, c context) string {
	id := uint16(number(b))
	if c.Node != nil {
		if name := c.Node(id); name != "" {
			return fmt.Sprintf("%d %s", id, name)
		}
	}
	return fmt.Sprint(id)
}

// endpoint renders an endpoint ID. 0 is the host; NoID is not shown.
func endpoint(b []byte, _ context) (string, bool) {
	switch id := number(b); id {
	case uint64(endpointmap.NoID):
		return "", false
	case conntrack.Outside:
		return "outside", true
	default:
		return fmt.Sprint(id), true
	}
}

// address reads four or sixteen bytes. With mixed, sixteen bytes are IPv4 if all but the first four are 0.
func address(b []byte, mixed bool) netip.Addr {
	if len(b) == 4 || mixed && zero(b[4:]) {
		return netip.AddrFrom4([4]byte(b[:4]))
	}
	return netip.AddrFrom16([16]byte(b[:16]))
}

func addressText(a netip.Addr, port *part, b []byte) string {
	if port == nil {
		return a.String()
	}
	return netip.AddrPortFrom(a, uint16(port.of(b))).String()
}

func zero(b []byte) bool {
	for _, c := range b {
		if c != 0 {
			return false
		}
	}
	return true
}

// number reads up to eight bytes in little-endian order, the order of all machines that the objects are
// compiled for.
func number(b []byte) (n uint64) {
	for i := len(b) - 1; i >= 0; i-- {
		n = n<<8 | uint64(b[i])
	}
	return n
}

func put(b []byte, n uint64) {
	for i := range b {
		b[i] = byte(n >> (8 * i))
	}
}
