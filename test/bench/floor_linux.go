// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package main

import (
	"errors"
	"fmt"
	"net"
	"os"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/asm"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/sluice-net/sluice/test/internal/pod"
)

// The floors below are the minimal cost of any eBPF datapath, before it examines a packet.

// passingPair makes a bare veth pair with a program at both hooks of both ends that passes every packet. It shows the
// cost of the hooks.
func passingPair(prefix string) (_ path, remove func() error, err error) {
	p, remove, err := barePair(prefix)
	if err != nil {
		return path{}, nil, err
	}
	p.name = "bare pair, programs that pass"
	prog, err := loadClassifier(asm.Instructions{asm.Mov.Imm(asm.R0, int32(netlink.TC_ACT_OK)), asm.Return()})
	if err == nil {
		defer prog.Close()
		for _, end := range []pod.Pod{p.from, p.to} {
			err = errors.Join(err, pod.In(end.Netns, func() error {
				return classify("eth0", map[uint32]*ebpf.Program{
					netlink.HANDLE_MIN_INGRESS: prog, netlink.HANDLE_MIN_EGRESS: prog,
				})
			}))
		}
	}
	if err != nil {
		return path{}, nil, errors.Join(err, remove())
	}
	return p, remove, nil
}

// redirectedPair makes two pods whose host ends have a program that only calls bpf_redirect_peer. Sluice delivers in
// this way, but also decides and checks.
func redirectedPair(prefix string) (_ path, remove func() error, err error) {
	p := path{
		name: "only bpf_redirect_peer",
		from: pod.Pod{Name: prefix + "-a", Netns: pod.NetnsPath(prefix + "-a"), IPv4: bareFrom},
		to:   pod.Pod{Name: prefix + "-b", Netns: pod.NetnsPath(prefix + "-b"), IPv4: bareTo},
	}
	host := pod.NetnsPath(prefix + "-h")
	namespaces := []string{host, p.from.Netns, p.to.Netns}
	remove = func() error {
		var errs []error
		for _, ns := range namespaces {
			errs = append(errs, pod.DeleteNetns(ns))
		}
		return errors.Join(errs...)
	}
	for _, ns := range namespaces {
		if err := pod.NewNetns(ns); err != nil {
			return path{}, nil, errors.Join(err, remove())
		}
	}
	ends := []pod.Pod{p.from, p.to}
	macs := []net.HardwareAddr{{2, 0, 0, 0, 0, 1}, {2, 0, 0, 0, 0, 2}}
	err = pod.In(host, func() error {
		var links []netlink.Link
		for i, end := range ends {
			link, err := hostEnd(fmt.Sprintf("host%d", i), end.Netns, macs[i])
			if err != nil {
				return err
			}
			links = append(links, link)
		}
		for i, link := range links {
			prog, err := loadClassifier(asm.Instructions{
				asm.Mov.Imm(asm.R1, int32(links[1-i].Attrs().Index)),
				asm.Mov.Imm(asm.R2, 0),
				asm.FnRedirectPeer.Call(),
				asm.Return(),
			})
			if err != nil {
				return err
			}
			defer prog.Close()
			if err := classify(link.Attrs().Name, map[uint32]*ebpf.Program{netlink.HANDLE_MIN_INGRESS: prog}); err != nil {
				return err
			}
		}
		return nil
	})
	for i, end := range ends {
		err = errors.Join(err, pod.In(end.Netns, func() error {
			if err := configure(end.IPv4); err != nil {
				return err
			}
			link, err := netlink.LinkByName("eth0")
			if err != nil {
				return err
			}
			// There are no ARP replies on this path, so add the entry by hand.
			return netlink.NeighSet(&netlink.Neigh{
				LinkIndex: link.Attrs().Index, Family: unix.AF_INET, State: netlink.NUD_PERMANENT,
				IP: ends[1-i].IPv4.AsSlice(), HardwareAddr: macs[1-i],
			})
		}))
	}
	if err != nil {
		return path{}, nil, errors.Join(fmt.Errorf("make pods that are only redirected: %w", err), remove())
	}
	return p, remove, nil
}

// hostEnd makes a veth pair between the current namespace and a pod's, in which the device is eth0, and sets the
// host's end up.
func hostEnd(name, netns string, podMAC net.HardwareAddr) (netlink.Link, error) {
	peer, err := os.Open(netns)
	if err != nil {
		return nil, err
	}
	defer peer.Close()
	attributes := netlink.NewLinkAttrs()
	attributes.Name = name
	pair := &netlink.Veth{
		LinkAttrs: attributes, PeerName: "eth0", PeerNamespace: netlink.NsFd(int(peer.Fd())), PeerHardwareAddr: podMAC,
	}
	if err := netlink.LinkAdd(pair); err != nil {
		return nil, fmt.Errorf("make %s: %w", name, err)
	}
	link, err := netlink.LinkByName(name)
	if err != nil {
		return nil, err
	}
	return link, netlink.LinkSetUp(link)
}

func loadClassifier(instructions asm.Instructions) (*ebpf.Program, error) {
	return ebpf.NewProgram(&ebpf.ProgramSpec{
		Name: "bench", Type: ebpf.SchedCLS, Instructions: instructions, License: "Dual BSD/GPL",
	})
}

// classify attaches programs to the hooks of a device of the current namespace.
func classify(device string, hooks map[uint32]*ebpf.Program) error {
	link, err := netlink.LinkByName(device)
	if err != nil {
		return err
	}
	err = netlink.QdiscAdd(&netlink.Clsact{QdiscAttrs: netlink.QdiscAttrs{
		LinkIndex: link.Attrs().Index, Handle: netlink.MakeHandle(0xffff, 0), Parent: netlink.HANDLE_CLSACT,
	}})
	if err != nil {
		return fmt.Errorf("add clsact to %s: %w", device, err)
	}
	for hook, prog := range hooks {
		err := netlink.FilterAdd(&netlink.BpfFilter{
			FilterAttrs: netlink.FilterAttrs{
				LinkIndex: link.Attrs().Index, Parent: hook, Handle: 1, Priority: 1, Protocol: unix.ETH_P_ALL,
			},
			Fd: prog.FD(), Name: "bench", DirectAction: true,
		})
		if err != nil {
			return fmt.Errorf("attach a program to %s: %w", device, err)
		}
	}
	return nil
}
