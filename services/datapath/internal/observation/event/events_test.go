// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package event

import (
	"bytes"
	"encoding/binary"
	"net/netip"
	"testing"
	"time"

	"github.com/sluice-net/sluice/services/datapath/internal/bpf"
	"github.com/sluice-net/sluice/services/datapath/internal/kernel/conntrack"
)

func rawEvent(t testing.TB, w bpf.MapsSlEvent) []byte {
	t.Helper()
	raw, err := binary.Append(nil, binary.NativeEndian, &w)
	if err != nil {
		t.Fatal(err)
	}
	return raw
}

func TestDecodeEventReadsEveryField(t *testing.T) {
	w := bpf.MapsSlEvent{
		Time: 1, Reason: bpf.MapsSlReasonSL_REASON_NO_ROUTE, Direction: bpf.MapsSlDirectionSL_INGRESS, Type: bpf.MapsSlEventTypeSL_EVENT_VERDICT,
		Lost: 2, Ifindex: 3, Length: 4, SrcIdentity: 5, DstIdentity: 6, SrcSlot: 8, DstSlot: 9,
		Egress:  bpf.MapsSlSide{Epoch: 21, Table: 22, Rule: 23, By: 1, Action: 2, Audited: 0},
		Ingress: bpf.MapsSlSide{Epoch: 31, Table: 32, By: 2, Audited: 1},
		CtFlags: 0x0103, Reply: 1,
		Ethertype: 10, Sport: 11, Dport: 12, SrcMac: [6]byte{13}, Family: 4, Proto: 14, TcpFlags: 15,
		Src: [16]byte{10, 0, 0, 1, 99}, Dst: [16]byte{10, 0, 0, 2, 99},
		OrigDst: [16]byte{10, 96, 0, 1, 99}, OrigDport: 16,
	}
	want := Event{
		Type: ConnectionEvaluated, Reason: NoRoute, Direction: Ingress, Lost: 2, Ifindex: 3, Length: 4,
		SourceIdentity: 5, DestinationIdentity: 6, SourceSlot: 8, DestinationSlot: 9,
		EtherType: 10, SourceMAC: [6]byte{13}, Protocol: 14, TCPFlags: 15,
		Egress:     SideVerdict{By: ByRule, Table: 22, Epoch: 21, Rule: 23, Action: ActionAllow},
		Ingress:    SideVerdict{By: ByDefault, Table: 32, Epoch: 31, Action: ActionDeny, Audited: true},
		Connection: conntrack.OriginLow | conntrack.SeenReply | conntrack.PickedUp, Reply: true,
		Source: netip.MustParseAddrPort("10.0.0.1:11"), Destination: netip.MustParseAddrPort("10.0.0.2:12"),
		Original: netip.MustParseAddrPort("10.96.0.1:16"),
	}
	// a newer program may append fields
	for _, tail := range [][]byte{nil, {1, 2, 3}} {
		got, err := decodeEvent(append(rawEvent(t, w), tail...))
		got.Time = time.Time{}
		if err != nil || got != want {
			t.Errorf("with %d more bytes\n got %+v, %v\nwant %+v", len(tail), got, err, want)
		}
	}
	w.Family, w.Src, w.Dst, w.OrigDst = 6, [16]byte{0xfd, 15: 1}, [16]byte{0xfd, 15: 2}, [16]byte{0xfd, 15: 3}
	if got, err := decodeEvent(rawEvent(t, w)); err != nil || got.Source.String() != "[fd00::1]:11" ||
		got.Destination.String() != "[fd00::2]:12" || got.Original.String() != "[fd00::3]:16" {
		t.Errorf("IPv6: %v to %v by %v, %v", got.Source, got.Destination, got.Original, err)
	}
	// without a translation, whatever the port field has
	w.OrigDst = [16]byte{}
	if got, err := decodeEvent(rawEvent(t, w)); err != nil || got.Original.IsValid() {
		t.Errorf("not translated: %v, %v", got.Original, err)
	}
	w.OrigDst = [16]byte{0xfd, 15: 3}
	// a side that was not evaluated has no verdict, whatever the bytes are
	w.Egress.By = 0
	if got, err := decodeEvent(rawEvent(t, w)); err != nil || got.Egress != (SideVerdict{}) {
		t.Errorf("a side that was not evaluated: %+v, %v", got.Egress, err)
	}
	// but the event of a closed connection names the verdict that had allowed it
	w.Type, w.Egress.Rule, w.Ingress.By, w.Ingress.Rule = bpf.MapsSlEventTypeSL_EVENT_CLOSED, 23, 0, 0
	got, err := decodeEvent(rawEvent(t, w))
	if err != nil || got.Egress != (SideVerdict{By: ByRule, Epoch: 21, Rule: 23, Action: ActionAllow}) || got.Ingress != (SideVerdict{By: ByDefault, Epoch: 31, Action: ActionAllow}) {
		t.Errorf("the end of a connection: %+v and %+v, %v", got.Egress, got.Ingress, err)
	}
	w.Family = 0
	if got, err := decodeEvent(rawEvent(t, w)); err != nil || got.Source.IsValid() ||
		got.Destination.IsValid() || got.Original.IsValid() {
		t.Errorf("without addresses: %v to %v by %v, %v", got.Source, got.Destination, got.Original, err)
	}
}

func FuzzDecodeEvent(f *testing.F) {
	f.Add([]byte{})
	f.Add(rawEvent(f, bpf.MapsSlEvent{}))
	f.Add(rawEvent(f, bpf.MapsSlEvent{Family: 4, Reason: 16, Direction: 1}))
	f.Add(bytes.Repeat([]byte{0xff}, 200))
	size := binary.Size(bpf.MapsSlEvent{})
	f.Fuzz(func(t *testing.T, raw []byte) {
		e, err := decodeEvent(raw)
		if (err != nil) != (len(raw) < size) {
			t.Fatalf("%d bytes: %v", len(raw), err)
		}
		if e.Source.IsValid() != e.Destination.IsValid() {
			t.Errorf("one address of two: %+v", e)
		}
		if e.Reason.String() == "" || e.Direction.String() == "" || e.Type.String() == "" {
			t.Errorf("a nameless event: %+v", e)
		}
	})
}
