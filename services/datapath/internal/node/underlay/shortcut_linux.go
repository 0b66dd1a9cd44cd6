// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package underlay

import (
	"fmt"
	"slices"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/sluice-net/sluice/services/datapath/internal/endpoint/netdev"
	"github.com/sluice-net/sluice/services/datapath/internal/kernel/rtnl"
)

// Attributes of linux/fib_rules.h.
const (
	fraPriority = 6
	fraMark     = 10
	fraTunnelID = 12
	fraMarkMask = 16
	fraUIDRange = 20
	fraOrigin   = 21 // FRA_PROTOCOL: who created the rule
	fraIPProto  = 22
	fraSports   = 23
	fraDports   = 24
	fraDSCP     = 25
	fraDSCPMask = 28
)

// selectors are the properties of a packet by which a rule may select it, and which are unknown when a path is looked
// up.
//
// The mark is one of them: a rule of the output chain may mark tunnel packets, and the kernel then routes them again.
var selectors = map[uint16]string{
	fraMark: "the mark", fraMarkMask: "the mark",
	fraTunnelID: "the tunnel", fraUIDRange: "the user", fraIPProto: "the protocol", fraSports: "the source port",
	fraDports: "the destination port", fraDSCP: "the DSCP", fraDSCPMask: "the DSCP",
}

// Rules implements routing.Links.
func (u *Underlay) Rules() (rules []string, err error) {
	err = whole(func() error {
		rules = nil
		m := make([]byte, unix.SizeofRtMsg)
		m[0] = unix.AF_INET
		var b rtnl.Batch
		b.Add(unix.RTM_GETRULE, 0, m)
		return u.lists.Dump(&b, func(m []byte) {
			if len(m) < unix.SizeofRtMsg || m[0] != unix.AF_INET {
				return
			}
			priority, by, own := uint32(0), []string(nil), false
			if m[3] != 0 { // tos
				by = append(by, "the DSCP")
			}
			rtnl.Attrs(m, unix.SizeofRtMsg, func(kind uint16, v []byte) {
				if kind == fraPriority {
					priority = rtnl.Number(v)
				}
				if kind == fraOrigin && len(v) > 0 {
					own = v[0] == netdev.Protocol
				}
				if what, ok := selectors[kind]; ok && !slices.Contains(by, what) {
					by = append(by, what)
				}
			})
			if len(by) > 0 && !own {
				rules = append(rules, fmt.Sprintf("rule %d selects by %s", priority, strings.Join(by, " and ")))
			}
		})
	})
	if err != nil {
		return nil, fmt.Errorf("list routing rules: %w", err)
	}
	return rules, nil
}

// portRange is the sysctl of the kernel's source ports.
const portRange = "ipv4/ip_local_port_range"

// SourcePorts implements routing.Links.
func (u *Underlay) SourcePorts() (lowest, highest uint16, err error) {
	var text string
	err = u.o.Home.Do(func() (err error) {
		text, err = readSysctl(portRange)
		return err
	})
	if err != nil {
		return 0, 0, err
	}
	if _, err := fmt.Sscan(text, &lowest, &highest); err != nil {
		return 0, 0, fmt.Errorf("sysctl net/%s is %q: %w", portRange, text, err)
	}
	return lowest, highest, nil
}
