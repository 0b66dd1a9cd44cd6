// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package main

import (
	"fmt"
	"slices"
)

// interval is a range of points on the line protocol << 16 | port, on which
// policies are judged; both ends belong to it.
type interval struct{ first, last uint32 }

const lastPoint = 0xFF<<16 | 0xFFFF

func point(protocol, port uint32) uint32 { return protocol<<16 | port }

// intervals is a set of points.
type intervals []interval

// merged is the set, sorted, with as few intervals as it takes.
func (s intervals) merged() intervals {
	sorted := slices.Clone(s)
	slices.SortFunc(sorted, func(a, b interval) int { return int(a.first) - int(b.first) })
	var out intervals
	for _, i := range sorted {
		if n := len(out); n > 0 && i.first <= out[n-1].last+1 {
			out[n-1].last = max(out[n-1].last, i.last)
			continue
		}
		out = append(out, i)
	}
	return out
}

// complement is every point that is not in the merged set.
func (s intervals) complement() intervals {
	var out intervals
	next := uint32(0)
	for _, i := range s {
		if i.first > next {
			out = append(out, interval{next, i.first - 1})
		}
		next = i.last + 1
	}
	if next <= lastPoint {
		out = append(out, interval{next, lastPoint})
	}
	return out
}

// texts are the set in words, by what is left out if that is shorter.
func (s intervals) texts() []string {
	set := s.merged()
	in := set.words()
	if out := set.complement().words(); len(out) < len(in) {
		if len(out) == 0 {
			return []string{"everything"}
		}
		out[0] = "everything but " + out[0]
		return out
	}
	return in
}

// words are each interval in words.
func (s intervals) words() []string {
	var words []string
	for _, i := range s {
		first, last := i.first>>16, i.last>>16
		if first == last {
			words = append(words, portsText(first, i.first&0xFFFF, i.last&0xFFFF))
			continue
		}
		if i.first&0xFFFF != 0 {
			words = append(words, portsText(first, i.first&0xFFFF, 0xFFFF))
			first++
		}
		end := ""
		if i.last&0xFFFF != 0xFFFF {
			end = portsText(last, 0, i.last&0xFFFF)
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

// portsText is a range of ports of one protocol, or of types and codes.
func portsText(protocol, first, last uint32) string {
	name := protocolText(protocol)
	switch {
	case !hasPorts(protocol) && !isICMP(protocol):
		return fmt.Sprintf("protocol %d", protocol)
	case first == 0 && last == 0xFFFF:
		return name
	case isICMP(protocol):
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
