// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package equivalence

import (
	"bytes"
	"fmt"
	"net/netip"
	"os/exec"
	"strings"
	"testing"

	"google.golang.org/protobuf/encoding/protodelim"

	policyv1 "github.com/sluice-net/sluice/proto/gen/sluice/policy/v1"
	vectorv1 "github.com/sluice-net/sluice/proto/gen/sluice/policyvector/v1"
)

func TestNoPacketBelongsToTheConnectionOfAnother(t *testing.T) {
	a, b := netip.MustParseAddr("10.0.0.1"), netip.MustParseAddr("10.0.0.2")
	var f flows
	seen := map[string]string{}
	send := func(src, dst netip.Addr, proto uint8, dport uint16) {
		t.Helper()
		sport, fresh := f.port(src, dst, proto, dport)
		if !fresh {
			t.Fatalf("%v to %v: no port is left", src, dst)
		}
		if proto == protoICMP {
			dport = sport
		}
		packet := fmt.Sprintf("%v %v > %v %v, protocol %d", src, sport, dst, dport, proto)
		for _, key := range []string{
			fmt.Sprint(proto, src, sport, dst, dport), fmt.Sprint(proto, dst, dport, src, sport),
		} {
			if other, ok := seen[key]; ok {
				t.Fatalf("%s belongs to the connection of %s", packet, other)
			}
		}
		seen[fmt.Sprint(proto, src, sport, dst, dport)] = packet
	}
	// The second packet would be a reply to the first, because its port would be the next one.
	first, _ := new(flows).port(a, b, protoTCP, 80)
	send(a, b, protoTCP, first+1)
	send(b, a, protoTCP, first)
	for i := range 3000 { // every possible pair of ports
		send(a, b, protoUDP, uint16(1024+i))
		send(b, a, protoUDP, uint16(1024+i))
	}
	for range 70 {
		send(a, b, protoICMP, 8<<8)
		send(b, a, protoICMP, 0)
	}
	if _, fresh := f.port(a, b, 47, 0); fresh {
		t.Error("a protocol without ports returned a fresh port")
	}
}

// TestPortThatMayHaveBeenUsedIsNotFresh asks for more ports than exist, and for more flows than are
// remembered.
func TestPortThatMayHaveBeenUsedIsNotFresh(t *testing.T) {
	a, b := netip.MustParseAddr("10.0.0.1"), netip.MustParseAddr("10.0.0.2")
	var f flows
	for i := range ports {
		if _, fresh := f.port(a, b, protoICMP, 8<<8); !fresh {
			t.Fatalf("identifier number %d is not fresh", i)
		}
	}
	if _, fresh := f.port(b, a, protoICMP, 8<<8); fresh {
		t.Error("an identifier that was used is fresh")
	}
	for dport := range uint16(maxFlows/ports + 1) {
		for range ports - 10 {
			f.port(a, b, protoUDP, 60000+dport)
		}
	}
	if _, fresh := f.port(a, b, protoUDP, 1); fresh {
		t.Error("a port is fresh although flows were forgotten")
	}
}

// listener records the errors of a test, and continues.
type listener struct {
	testing.TB
	errors []string
}

func (l *listener) Errorf(format string, args ...any) {
	l.errors = append(l.errors, fmt.Sprintf(format, args...))
}
func (l *listener) Fail()               { l.errors = append(l.errors, "") }
func (l *listener) Logf(string, ...any) {}

// TestKernelExaminationGoesOnAfterAMismatch: a wrong answer, or a view that cannot be set up, fails its cases and no
// others.
func TestKernelExaminationGoesOnAfterAMismatch(t *testing.T) {
	out, err := exec.CommandContext(t.Context(), producer(t), "random", "-n", "600", "-seed", "7").Output()
	if err != nil {
		t.Fatal(err)
	}
	var changed bytes.Buffer
	views, questions, wrong, lost := 0, 0, 0, 0
	for in := bytes.NewReader(out); in.Len() > 0; {
		f := new(vectorv1.Frame)
		if err := protodelim.UnmarshalFrom(in, f); err != nil {
			t.Fatal(err)
		}
		switch x := f.GetFrame().(type) {
		case *vectorv1.Frame_View:
			x.View.File = []string{"good", "wrong", "broken"}[min(views, 3)%3]
			if views > 2 {
				x.View.File = "good"
			}
			views++
		case *vectorv1.Frame_Question:
			questions++
			switch {
			case views == 3:
				lost++
			case views == 2 && wrong == 0:
				wrong++
				x.Question.Action = policyv1.Action_ACTION_DENY + policyv1.Action_ACTION_ALLOW - x.Question.GetAction()
			}
		case *vectorv1.Frame_Tables:
			if views == 3 { // invalid steps
				x.Tables.Steps = []*policyv1.Step{{Step: &policyv1.Step_BindSubject{BindSubject: &policyv1.BindSubject{Subject: 300, Table: 4711}}}}
			}
		}
		if _, err := protodelim.MarshalTo(&changed, f); err != nil {
			t.Fatal(err)
		}
	}
	x := newExaminer(t, 8)
	heard := &listener{TB: t}
	x.t = heard
	if err := x.examine(t.Context(), &changed); err != nil {
		t.Fatal(err)
	}
	asked := 0
	for _, f := range x.files {
		asked += f.questions
	}
	if asked != questions-lost {
		t.Errorf("asked %d questions, want %d of %d", asked, questions-lost, questions)
	}
	for file, want := range map[string]bool{"good": false, "wrong": true, "broken": true} {
		if f := x.files[file]; f == nil || (f.failures > 0) != want {
			t.Errorf("%s: %+v, want failures: %t; %s", file, f, want, strings.Join(heard.errors, "\n"))
		}
	}
}
