// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package main

import (
	"bytes"
	"encoding/json"
	"net"
	"strconv"
	"testing"
)

// port returns the port of a listener's address.
func port(t *testing.T, a net.Addr) int {
	t.Helper()
	_, text, err := net.SplitHostPort(a.String())
	if err != nil {
		t.Fatal(err)
	}
	number, err := strconv.Atoi(text)
	if err != nil {
		t.Fatal(err)
	}
	return number
}

func TestOnlyWhatAnswersIsReached(t *testing.T) {
	tcp, err := net.Listen("tcp4", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer tcp.Close()
	// One server that answers, and one that does not.
	answering, err := net.ListenPacket("udp4", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer answering.Close()
	silent, err := net.ListenPacket("udp4", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer silent.Close()
	go func() {
		for buffer := make([]byte, 16); ; {
			n, from, err := answering.ReadFrom(buffer)
			if err != nil {
				return
			}
			_, _ = answering.WriteTo(buffer[:n], from)
		}
	}()
	refusing, err := net.Listen("tcp4", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	refused := port(t, refusing.Addr())
	if err := refusing.Close(); err != nil {
		t.Fatal(err)
	}

	want := map[string]bool{"tcp": true, "udp": true, "silent": false, "refused": false, "unknown": false, "sctp": false}
	questions := batch{Requests: []target{
		{"tcp", "TCP", "127.0.0.1", port(t, tcp.Addr())},
		{"udp", "UDP", "127.0.0.1", port(t, answering.LocalAddr())},
		{"silent", "UDP", "127.0.0.1", port(t, silent.LocalAddr())},
		{"refused", "TCP", "127.0.0.1", refused},
		{"unknown", "TCP", "no-such-host.invalid", port(t, tcp.Addr())},
		{"sctp", "SCTP", "127.0.0.1", port(t, tcp.Addr())},
	}}
	var in, out bytes.Buffer
	for range 2 {
		if err := json.NewEncoder(&in).Encode(questions); err != nil {
			t.Fatal(err)
		}
	}
	if err := serve(&in, &out); err != nil {
		t.Fatal(err)
	}
	lines := bytes.Split(bytes.TrimSpace(out.Bytes()), []byte("\n"))
	if len(lines) != 2 {
		t.Fatalf("%d lines answer 2 batches:\n%s", len(lines), out.Bytes())
	}
	for _, line := range lines {
		var results []result
		if err := json.Unmarshal(line, &results); err != nil || len(results) != len(want) {
			t.Fatalf("%v: %s", err, line)
		}
		for _, r := range results {
			if got := r.Error == ""; got != want[r.Request.Key] {
				t.Errorf("%+v is reached: %t, want %t: %s", r.Request, got, want[r.Request.Key], r.Error)
			}
		}
	}
}
