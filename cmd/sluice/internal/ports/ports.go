// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

// Package ports formats protocols and sets of ports for people.
package ports

import (
	"fmt"
	"slices"
	"strconv"
)

var Protocols = map[string]uint32{"icmp": 1, "tcp": 6, "udp": 17, "icmpv6": 58, "sctp": 132}

// ProtocolText returns the name of a protocol, or its number.
func ProtocolText(n uint32) string {
	if n == 0 {
		return ""
	}
	for name, number := range Protocols {
		if number == n {
			return name
		}
	}
	return strconv.FormatUint(uint64(n), 10)
}

// HasPorts reports whether packets of a protocol have ports.
func HasPorts(protocol uint32) bool { return protocol == 6 || protocol == 17 || protocol == 132 }

// IsICMP reports whether packets of a protocol have a type and a code.
func IsICMP(protocol uint32) bool { return protocol == 1 || protocol == 58 }

// ServiceText returns "tcp port 80", "icmp type 8 code 0" or "protocol 47".
func ServiceText(protocol, port uint32) string {
	switch {
	case HasPorts(protocol):
		return fmt.Sprintf("%s port %d", ProtocolText(protocol), port)
	case IsICMP(protocol):
		return fmt.Sprintf("%s type %d code %d", ProtocolText(protocol), port>>8, port&0xFF)
	default:
		return fmt.Sprintf("protocol %d", protocol)
	}
}

// Interval is a range of points, each protocol << 16 | port. First and Last belong to it.
type Interval struct{ First, Last uint32 }

const LastPoint = 0xFF<<16 | 0xFFFF

// Point returns protocol << 16 | port.
func Point(protocol, port uint32) uint32 { return protocol<<16 | port }

// Intervals is a set of points.
type Intervals []Interval

// merged returns the set as a minimal, sorted list.
func (s Intervals) merged() Intervals {
	sorted := slices.Clone(s)
	slices.SortFunc(sorted, func(a, b Interval) int { return int(a.First) - int(b.First) })
	var out Intervals
	for _, i := range sorted {
		if n := len(out); n > 0 && i.First <= out[n-1].Last+1 {
			out[n-1].Last = max(out[n-1].Last, i.Last)
			continue
		}
		out = append(out, i)
	}
	return out
}

// complement returns all points that are not in the merged set.
func (s Intervals) complement() Intervals {
	var out Intervals
	next := uint32(0)
	for _, i := range s {
		if i.First > next {
			out = append(out, Interval{next, i.First - 1})
		}
		next = i.Last + 1
	}
	if next <= LastPoint {
		out = append(out, Interval{next, LastPoint})
	}
	return out
}

// Texts describes the set in words, as the complement of another set if that is shorter.
func (s Intervals) Texts() []string {
	set := s.merged()
	in := set.texts()
	if out := set.complement().texts(); len(out) < len(in) {
		if len(out) == 0 {
			return []string{"everything"}
		}
		out[0] = "everything but " + out[0]
		return out
	}
	return in
}

// texts describes each interval.
func (s Intervals) texts() []string {
	var words []string
	for _, i := range s {
		first, last := i.First>>16, i.Last>>16
		if first == last {
			words = append(words, portsText(first, i.First&0xFFFF, i.Last&0xFFFF))
			continue
		}
		if i.First&0xFFFF != 0 {
			words = append(words, portsText(first, i.First&0xFFFF, 0xFFFF))
			first++
		}
		end := ""
		if i.Last&0xFFFF != 0xFFFF {
			end = portsText(last, 0, i.Last&0xFFFF)
			last--
		}
		switch {
		case first > last:
		case first == last:
			words = append(words, portsText(first, 0, 0xFFFF))
		default:
			words = append(words, fmt.Sprintf("protocols %d to %d", first, last))
		}
		if end != "" {
			words = append(words, end)
		}
	}
	return words
}

// portsText describes a range of ports of one protocol, or of ICMP types and codes.
func portsText(protocol, first, last uint32) string {
	name := ProtocolText(protocol)
	switch {
	case !HasPorts(protocol) && !IsICMP(protocol):
		return fmt.Sprintf("protocol %d", protocol)
	case first == 0 && last == 0xFFFF:
		return name
	case IsICMP(protocol):
		if first == last {
			return fmt.Sprintf("%s type %d code %d", name, first>>8, first&0xFF)
		}
		if first&0xFF == 0 && last&0xFF == 0xFF {
			if first>>8 == last>>8 {
				return fmt.Sprintf("%s type %d", name, first>>8)
			}
			return fmt.Sprintf("%s types %d to %d", name, first>>8, last>>8)
		}
		return fmt.Sprintf("%s type %d code %d to type %d code %d", name, first>>8, first&0xFF, last>>8, last&0xFF)
	case first == last:
		return fmt.Sprintf("%s %d", name, first)
	default:
		return fmt.Sprintf("%s %d-%d", name, first, last)
	}
}
