// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package servicemap

import (
	"fmt"
	"net/netip"
	"strings"

	"github.com/sluice-net/sluice/services/datapath/internal/bpf"
	"github.com/sluice-net/sluice/services/datapath/internal/kernel/pin"
	"github.com/sluice-net/sluice/services/datapath/internal/service/rendezvous"
)

// DescribeKey4 puts a key of sl_fe4 into words.
func DescribeKey4(k *bpf.MapsSlFeKey4) string { return describeKey(rawKey{family: ip4, four: *k}) }

// DescribeKey6 puts a key of sl_fe6 into words.
func DescribeKey6(k *bpf.MapsSlFeKey6) string { return describeKey(rawKey{family: ip6, six: *k}) }

func describeKey(k rawKey) string {
	switch key := k.frontend(); {
	case k.isAddress():
		return fmt.Sprintf("%v, of services alone", key.Addr)
	case key.Node:
		return fmt.Sprintf("node port %v", key)
	default:
		return key.String()
	}
}

// DescribeFronts puts a value of sl_fe4 or sl_fe6 into words.
func DescribeFronts(v *bpf.MapsSlFe) string {
	if *v == (bpf.MapsSlFe{}) {
		return "no front"
	}
	return fmt.Sprintf("inside front %d outside front %d", v.Inside, v.Outside)
}

// DescribeFront puts an element of sl_front into words.
func DescribeFront(v *bpf.MapsSlFront) string {
	base, count, table := run(v.List)
	words := []string{fmt.Sprintf("port %d address %s", v.Port, describeFrontAddr(v.Addr))}
	switch count {
	case 0:
		words = append(words, "no backend")
	default:
		words = append(words, fmt.Sprintf("members %d to %d", base, base+count-1))
	}
	if table > 0 {
		slots := rendezvous.Slots(min(table, rendezvous.MaxBits+1)) // larger ones are corrupt
		words = append(words, fmt.Sprintf("table of %d slots %d to %d", slots, base+count, base+count+slots-1))
	}
	for _, f := range []struct {
		bit  uint64
		word string
	}{{flagDrop, "drops without a backend"}, {flagSources, "from source ranges only"}} {
		if v.List>>flagsShift&f.bit != 0 {
			words = append(words, f.word)
		}
	}
	if v.Timeout != 0 {
		words = append(words, fmt.Sprintf("affinity %d s group %d", v.Timeout, v.Group))
	}
	return strings.Join(words, ", ")
}

// describeFrontAddr is the address of a front, which does not say of which family
// it is: an IPv4 address is followed by zeros, as no address of a service is.
func describeFrontAddr(b [16]byte) string {
	if [12]byte(b[4:]) == [12]byte{} {
		return netip.AddrFrom4([4]byte(b[:4])).String()
	}
	return netip.AddrFrom16(b).String()
}

// DescribeMember puts an element of sl_member into words.
func DescribeMember(v *uint64) string { return fmt.Sprintf("backend %d salt %#x", uint32(*v), *v>>32) }

var stateNames = map[uint8]string{backendFree: "free", backendActive: "active", backendGone: "gone"}

// DescribeBackend4 puts an element of sl_be4 into words.
func DescribeBackend4(v *uint64) string { return describeBackend(pin.Addr4(uint32(*v)), *v) }

// DescribeBackend6 puts an element of sl_be6 into words.
func DescribeBackend6(v *bpf.MapsSlBe6) string {
	return describeBackend(netip.AddrFrom16(v.Addr), v.Word)
}

func describeBackend(a netip.Addr, w uint64) string {
	state := uint8(w >> stateShift)
	name, ok := stateNames[state]
	if !ok {
		name = fmt.Sprintf("state %d", state)
	}
	words := fmt.Sprintf("%s generation %d", name, w>>genShift)
	if state == backendFree {
		return words
	}
	return fmt.Sprintf("%v %s", netip.AddrPortFrom(a, uint16(w>>portShift)), words)
}
