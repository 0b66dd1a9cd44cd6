// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package exchange

import (
	"fmt"
	"slices"
	"testing"

	"github.com/sluice-net/sluice/services/dns/internal/report"
)

// reported is a Reporter that keeps the messages of the pods that it wants.
type reported struct {
	without uint16 // endpoint
	list    []string
}

func (r *reported) Wants(endpoint uint16) bool { return endpoint != r.without }

func (r *reported) Add(endpoint uint16, m report.Message) {
	transport := "udp "
	if m.TCP {
		transport = "tcp "
	}
	r.list = append(r.list, transport+fmt.Sprint(endpoint, " ", m.Name, " ", m.Response, " ", m.Dropped, " ", m.Code, " ",
		m.Addresses, " ", m.TTL))
}

func TestMessagesAreReported(t *testing.T) {
	r := &reported{without: 8}
	b := newBench(t, func(o *Options) { o.Report = r })
	b.ask(t, client, 5, "wWw.example.com.")
	b.Query(client, query(t, 6, "www.example.net."), nil)
	b.Query(client, query(t, 7, "www.example.net.cluster.local."), nil)
	b.settled(t, client, answer(t, 5, "www.example.com.", "192.0.2.1"))
	b.Answer(client, answer(t, 5, "www.example.com.", "192.0.2.9")) // forged: the query was answered already
	other := client
	other.Endpoint = 8
	b.ask(t, other, 5, "www.example.com.")
	overTCP := client
	overTCP.TCP = true
	b.ask(t, overTCP, 9, "www.example.com.")
	b.Answer(client, answer(t, 9, "www.example.com.", "192.0.2.9")) // the query was not asked over UDP
	want := []string{
		"udp 7 www.example.com. false false 0 [] 0s",
		"udp 7 www.example.net. false true 5 [] 0s",
		"udp 7 www.example.net.cluster.local. false true 3 [] 0s",
		"udp 7 www.example.com. true false 0 [192.0.2.1] 1m40s",
		"udp 7 www.example.com. true true 0 [] 0s",
		"tcp 7 www.example.com. false false 0 [] 0s",
		"udp 7 www.example.com. true true 0 [] 0s",
	}
	if !slices.Equal(r.list, want) {
		t.Errorf("got  %q\nwant %q", r.list, want)
	}
}
