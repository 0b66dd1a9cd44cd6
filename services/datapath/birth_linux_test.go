// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package main

import (
	"errors"
	"fmt"
	"syscall"
	"testing"

	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"

	"github.com/sluice-net/sluice/services/datapath/internal/kernel/netns/netnstest"
)

// linkEvents subscribes to link events in a namespace. The returned function gives the events since its last call.
func linkEvents(t *testing.T, do func(func() error) error) func() []linkEvent {
	t.Helper()
	var s *nl.NetlinkSocket
	err := do(func() (err error) {
		s, err = nl.Subscribe(unix.NETLINK_ROUTE, unix.RTNLGRP_LINK)
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(s.Close)
	return func() (events []linkEvent) {
		t.Helper()
		buf := make([]byte, 1<<16)
		for {
			n, _, err := unix.Recvfrom(s.GetFd(), buf, unix.MSG_DONTWAIT)
			if errors.Is(err, unix.EAGAIN) {
				return events
			}
			if err != nil {
				t.Fatal(err)
			}
			msgs, err := syscall.ParseNetlinkMessage(buf[:n])
			if err != nil {
				t.Fatal(err)
			}
			for _, m := range msgs {
				events = append(events, linkEventOf(t, m))
			}
		}
	}
}

type linkEvent struct {
	deleted bool
	index   int32
	name    string
	moved   bool // the event reports that the device left for another namespace
}

func (e linkEvent) String() string {
	verb := "new"
	if e.deleted {
		verb = "deleted"
	}
	if e.moved {
		verb += ", moved,"
	}
	return fmt.Sprintf("%s %d %s", verb, e.index, e.name)
}

func linkEventOf(t *testing.T, m syscall.NetlinkMessage) linkEvent {
	t.Helper()
	attrs, err := nl.ParseRouteAttr(m.Data[unix.SizeofIfInfomsg:])
	if err != nil {
		t.Fatal(err)
	}
	e := linkEvent{deleted: m.Header.Type == unix.RTM_DELLINK, index: nl.DeserializeIfInfomsg(m.Data).Index}
	for _, a := range attrs {
		switch a.Attr.Type {
		case unix.IFLA_IFNAME:
			e.name = unix.ByteSliceToString(a.Value)
		case unix.IFLA_NEW_NETNSID, unix.IFLA_NEW_IFINDEX:
			e.moved = true
		}
	}
	return e
}

// TestKernelDevicesAreMadeWhereTheyStayUnderTheirNames proves INV-24.
func TestKernelDevicesAreMadeWhereTheyStayUnderTheirNames(t *testing.T) {
	w := newWorld(t)
	w.start(true)
	ns := netnstest.New(t)
	spec := w.spec("a", ns)
	home, inside := linkEvents(t, w.home.Do), linkEvents(t, ns.Do)
	ep, err := w.node.Endpoints.Lifecycle.Create(t.Context(), spec, false)
	if err != nil {
		t.Fatal(err)
	}
	for _, c := range []struct {
		where  string
		events []linkEvent
		index  uint32
		name   string
	}{
		{"the node's namespace", home(), ep.Device.HostIndex, ep.Device.HostName},
		{"the container's namespace", inside(), ep.Device.Index, "eth0"},
	} {
		if len(c.events) == 0 {
			t.Errorf("%s: no event, so the test does not see link events", c.where)
		}
		for _, e := range c.events {
			if e.deleted || e.moved || e.index != int32(c.index) || e.name != c.name {
				t.Errorf("%s: %v; want only new %d %s", c.where, e, c.index, c.name)
			}
		}
	}
}
