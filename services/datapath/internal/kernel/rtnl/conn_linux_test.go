// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package rtnl

import (
	"encoding/binary"
	"errors"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/sluice-net/sluice/services/datapath/internal/kernel/netns/netnstest"
)

// open opens a connection in a new namespace.
func open(t *testing.T) *Conn {
	t.Helper()
	var c *Conn
	err := netnstest.New(t).Do(func() (err error) {
		c, err = Open()
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { c.Close() })
	return c
}

func infomsg(index uint32) []byte {
	m := make([]byte, unix.SizeofIfInfomsg)
	binary.NativeEndian.PutUint32(m[4:], index)
	return m
}

func addVeth(b *Batch, name string) {
	b.Add(unix.RTM_NEWLINK, unix.NLM_F_CREATE|unix.NLM_F_EXCL, infomsg(0))
	b.For("make %s", name)
	b.String(unix.IFLA_IFNAME, name)
	b.Nest(unix.IFLA_LINKINFO, nil, func() { b.String(unix.IFLA_INFO_KIND, "veth") })
}

func getLink(b *Batch, name string) int {
	i := b.Add(unix.RTM_GETLINK, 0, infomsg(0))
	b.String(unix.IFLA_IFNAME, name)
	return i
}

func nameOf(m []byte) (name string) {
	Attrs(m, unix.SizeofIfInfomsg, func(kind uint16, v []byte) {
		if kind == unix.IFLA_IFNAME {
			name = unix.ByteSliceToString(v)
		}
	})
	return name
}

// TestKernelRequestsOfABatchAreCarriedOutInOrderAndAllOfThem: each reply belongs to its own request, whether
// that failed, returned data or neither.
func TestKernelRequestsOfABatchAreCarriedOutInOrderAndAllOfThem(t *testing.T) {
	c := open(t)
	var b Batch
	absent := getLink(&b, "one")
	addVeth(&b, "one")
	present := getLink(&b, "one")
	addVeth(&b, "one")
	addVeth(&b, "two")
	last := getLink(&b, "two")
	replies, err := c.Exchange(&b)
	if err != nil {
		t.Fatal(err)
	}
	for i, want := range []error{unix.ENODEV, nil, nil, unix.EEXIST, nil, nil} {
		if !errors.Is(replies[i].Err, want) {
			t.Errorf("request %d: %v, want %v", i, replies[i].Err, want)
		}
	}
	for i, want := range map[int]string{absent: "", present: "one", 1: "", last: "two"} {
		if got := nameOf(replies[i].Data); got != want {
			t.Errorf("request %d gave %q, want %q", i, got, want)
		}
	}
}

func TestKernelDoNamesTheRequestThatFailed(t *testing.T) {
	c := open(t)
	var b Batch
	addVeth(&b, "one")
	addVeth(&b, "one")
	addVeth(&b, "two")
	err := c.Do(&b)
	if !errors.Is(err, unix.EEXIST) || !strings.HasPrefix(err.Error(), "make one: ") {
		t.Errorf("%v, want the error of request one", err)
	}
	if err := c.Do(&b, unix.EEXIST); err != nil {
		t.Errorf("an error that is expected: %v", err)
	}
}

// TestKernelErrorHasTheKernelsWords: the error contains the kernel's explanation.
func TestKernelErrorHasTheKernelsWords(t *testing.T) {
	c := open(t)
	var b Batch
	b.Add(unix.RTM_NEWLINK, unix.NLM_F_CREATE|unix.NLM_F_EXCL, infomsg(0))
	b.Nest(unix.IFLA_LINKINFO, nil, func() { b.String(unix.IFLA_INFO_KIND, "nosuchkind") })
	replies, err := c.Exchange(&b)
	if err != nil {
		t.Fatal(err)
	}
	if err := replies[0].Err; !errors.Is(err, unix.EOPNOTSUPP) || !strings.Contains(err.Error(), "Unknown device type") {
		t.Errorf("%v, want the kernel's text", err)
	}
}

func TestKernelDumpHasAllAndLeavesTheSocketUsable(t *testing.T) {
	c := open(t)
	const devices = 300 // more than fit into one part of a listing
	for range devices / 10 {
		var b Batch
		for range 10 {
			b.Add(unix.RTM_NEWLINK, unix.NLM_F_CREATE|unix.NLM_F_EXCL, infomsg(0))
			b.For("make a pair")
			b.Nest(unix.IFLA_LINKINFO, nil, func() { b.String(unix.IFLA_INFO_KIND, "veth") })
		}
		if err := c.Do(&b); err != nil {
			t.Fatal(err)
		}
	}
	for range 2 {
		var b Batch
		b.Add(unix.RTM_GETLINK, 0, infomsg(0))
		names := map[string]bool{}
		if err := c.Dump(&b, func(m []byte) { names[nameOf(m)] = true }); err != nil {
			t.Fatal(err)
		}
		if want := 2*devices + 1; len(names) != want || !names["lo"] {
			t.Errorf("%d devices, want %d with lo", len(names), want)
		}
	}
}

func TestKernelClosedConnectionSaysSo(t *testing.T) {
	c := open(t)
	for range 2 {
		if err := c.Close(); err != nil {
			t.Error(err)
		}
	}
	var b Batch
	getLink(&b, "lo")
	if _, err := c.Exchange(&b); !errors.Is(err, ErrClosed) {
		t.Errorf("%v, want %v", err, ErrClosed)
	}
}

// FuzzAttrs: attributes with invalid lengths end the parsing.
func FuzzAttrs(f *testing.F) {
	var b Batch
	b.Add(0, 0, nil)
	b.String(3, "eth0")
	b.Nest(18, []byte{1, 2, 3, 4}, func() { b.Uint32(1, 7) })
	f.Add(b.b, 16)
	f.Add([]byte{3, 0, 1, 0}, 0)
	f.Add([]byte{255, 255, 1, 0}, 0)
	f.Fuzz(func(t *testing.T, m []byte, skip int) {
		if skip < 0 {
			skip = 0
		}
		size := 0
		Attrs(m, skip, func(_ uint16, v []byte) { size += sizeofAttr + len(v) })
		if size > max(0, len(m)-skip) {
			t.Errorf("attributes of %d bytes in %d", size, len(m)-skip)
		}
	})
}
