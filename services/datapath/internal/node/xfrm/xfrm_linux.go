// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

// Package xfrm reads and watches the IPsec policies of a network namespace. The kernel applies them to packets that its
// stack forwards, but not to packets that an eBPF program sends directly.
package xfrm

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"strings"
	"time"

	"github.com/mdlayher/netlink"
	"golang.org/x/sys/unix"

	"github.com/sluice-net/sluice/services/datapath/internal/kernel/netns"
)

// Constants of linux/xfrm.h.
const (
	msgNewPolicy  = 0x13
	msgGetPolicy  = 0x15
	msgGetDefault = 0x28
	groupPolicy   = 4

	lenPolicyID   = 64  // struct xfrm_userpolicy_id
	lenPolicyInfo = 168 // struct xfrm_userpolicy_info
	atDirection   = 160 // offset in it
	atAction      = 161

	attrTemplate  = 5
	attrInterface = 31

	directionIn      = 0
	directionOut     = 1
	directionForward = 2
	actionAllow      = 0
	defaultBlock     = 1
)

// Policies counts the policies of a namespace that may encrypt or block forwarded packets. Policies that let packets
// pass unchanged do not count, nor do policies of sockets and of xfrm interfaces.
type Policies struct {
	Out     int  // policies for outgoing packets
	Forward int  // policies for received packets that are forwarded
	Blocked bool // packets without a matching policy are blocked
	// In and BlockedIn are the same for received packets that are for the node itself. They do not affect packets that the
	// node forwards.
	In        int
	BlockedIn bool
}

// Any reports whether any policy applies.
func (p Policies) Any() bool { return p.Out+p.Forward > 0 || p.Blocked }

// OfNode describes the policies that may apply to packets from and to the node itself, for example to its tunnel
// packets; "": no policy may.
func (p Policies) OfNode() string {
	if p.Out+p.In == 0 && !p.Blocked && !p.BlockedIn {
		return ""
	}
	var words []string
	for _, w := range []struct {
		n    int
		what string
	}{{p.Out, "out"}, {p.In, "in"}} {
		if w.n > 0 {
			words = append(words, fmt.Sprintf("%d %s", w.n, w.what))
		}
	}
	if p.Blocked || p.BlockedIn {
		words = append(words, "default block")
	}
	return "xfrm policies: " + strings.Join(words, ", ")
}

// String describes the policies that may apply to forwarded packets.
func (p Policies) String() string {
	var words []string
	for _, w := range []struct {
		n    int
		what string
	}{{p.Out, "out"}, {p.Forward, "fwd"}} {
		if w.n > 0 {
			words = append(words, fmt.Sprintf("%d %s", w.n, w.what))
		}
	}
	if p.Blocked {
		words = append(words, "default block")
	}
	if len(words) == 0 {
		return "no xfrm policies"
	}
	return "xfrm policies: " + strings.Join(words, ", ")
}

// Reader reads the policies of a namespace. Its methods may be called concurrently.
type Reader struct{ home *netns.Namespace }

// New returns a reader of home, which the caller keeps open.
func New(home *netns.Namespace) *Reader { return &Reader{home} }

// ErrAbsent is returned if the kernel does not support policies, or the module is not loaded yet.
var ErrAbsent = errors.New("the kernel has no xfrm policies")

func (r *Reader) dial() (*netlink.Conn, error) {
	c, err := netlink.Dial(unix.NETLINK_XFRM, &netlink.Config{NetNS: r.home.Fd()})
	if errors.Is(err, unix.EPROTONOSUPPORT) {
		return nil, ErrAbsent
	}
	if err != nil {
		return nil, fmt.Errorf("open xfrm netlink: %w", err)
	}
	return c, nil
}

// Policies reads the policies. A kernel without xfrm has none.
func (r *Reader) Policies() (p Policies, err error) {
	c, err := r.dial()
	if errors.Is(err, ErrAbsent) {
		return p, nil
	}
	if err != nil {
		return p, err
	}
	defer c.Close()
	msgs, err := c.Execute(netlink.Message{
		Header: netlink.Header{Type: msgGetPolicy, Flags: netlink.Request | netlink.Dump}, Data: make([]byte, lenPolicyID),
	})
	if err != nil {
		return p, fmt.Errorf("list xfrm policies: %w", err)
	}
	for _, m := range msgs {
		if m.Header.Type != msgNewPolicy {
			continue
		}
		if err := p.add(m.Data); err != nil {
			return p, fmt.Errorf("read an xfrm policy: %w", err)
		}
	}
	p.Blocked, p.BlockedIn, err = blocked(c)
	return p, err
}

// add counts a policy.
func (p *Policies) add(b []byte) error {
	if len(b) < lenPolicyInfo {
		return fmt.Errorf("%d bytes, want at least %d", len(b), lenPolicyInfo)
	}
	attrs, err := netlink.UnmarshalAttributes(b[lenPolicyInfo:])
	if err != nil {
		return err
	}
	plain := b[atAction] == actionAllow
	for _, a := range attrs {
		switch a.Type {
		case attrTemplate:
			plain = false
		case attrInterface:
			if len(a.Data) == 4 && binary.NativeEndian.Uint32(a.Data) != 0 {
				return nil
			}
		}
	}
	if plain {
		return nil
	}
	switch b[atDirection] {
	case directionOut:
		p.Out++
	case directionForward:
		p.Forward++
	case directionIn:
		p.In++
	}
	return nil
}

// blocked reports whether outgoing and forwarded packets, and whether received packets for the node, are blocked if no
// policy matches. Kernels before 5.14 never block them.
func blocked(c *netlink.Conn) (passing, in bool, err error) {
	msgs, err := c.Execute(netlink.Message{
		Header: netlink.Header{Type: msgGetDefault, Flags: netlink.Request}, Data: make([]byte, 3),
	})
	if errors.Is(err, unix.EINVAL) || errors.Is(err, unix.EOPNOTSUPP) {
		return false, false, nil
	}
	if err != nil {
		return false, false, fmt.Errorf("read the default xfrm policy: %w", err)
	}
	for _, m := range msgs { // in, forward, out
		if len(m.Data) >= 3 {
			passing = passing || m.Data[1] == defaultBlock || m.Data[2] == defaultBlock
			in = in || m.Data[0] == defaultBlock
		}
	}
	return passing, in, nil
}

// absentPause is the pause before a kernel without xfrm is checked again: the module may have been loaded.
const absentPause = 30 * time.Second

// Watch calls changed when policies may have changed, until ctx ends or the watch fails. On a kernel without xfrm it
// returns ErrAbsent after a while.
func (r *Reader) Watch(ctx context.Context, changed func()) error {
	c, err := r.dial()
	if errors.Is(err, ErrAbsent) {
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-time.After(absentPause):
			return ErrAbsent
		}
	}
	if err != nil {
		return err
	}
	defer c.Close()
	if err := c.JoinGroup(groupPolicy); err != nil {
		return fmt.Errorf("watch xfrm policies: %w", err)
	}
	defer context.AfterFunc(ctx, func() { c.Close() })()
	changed() // covers changes before the watch began
	for {
		// Lost messages are a change as well.
		if _, err := c.Receive(); err != nil && !errors.Is(err, unix.ENOBUFS) {
			if ctx.Err() != nil {
				return ctx.Err()
			}
			return fmt.Errorf("watch xfrm policies: %w", err)
		}
		changed()
	}
}
