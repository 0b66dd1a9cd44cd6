// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package proxy

import (
	"testing"
	"time"

	"google.golang.org/protobuf/types/known/durationpb"
	"google.golang.org/protobuf/types/known/timestamppb"

	"github.com/sluice-net/sluice/cmd/sluice/internal/test/nodetest"
	datapathv1 "github.com/sluice-net/sluice/proto/gen/sluice/datapath/v1"
	netv1 "github.com/sluice-net/sluice/proto/gen/sluice/net/v1"
)

func TestStatusShowsTheProxyAndItsPackets(t *testing.T) {
	n := nodetest.New(t, Command)
	out, _ := n.Want(t, 0, "proxy", "status")
	nodetest.WantLines(t, out, "This datapath has no proxies.")
	p := &datapathv1.ProxyStatus{
		Proxy: netv1.Proxy_PROXY_DNS, Attached: true, AttachedSince: timestamppb.New(time.Now().Add(-100 * time.Hour)),
		Pid: 42, Device: "slp0", HeartbeatAge: durationpb.New(12345 * time.Microsecond), Attachments: 3,
		TcpAttached: true, TcpDevice: "slp1",
	}
	n.Proxies = []*datapathv1.ProxyStatus{p}
	out, _ = n.Want(t, 0, "proxy", "status")
	nodetest.WantLines(t, out, "dns for 4d 42 slp0 12ms ago by slp1 3", "0 forwarded to a proxy",
		"0 dropped: beyond the share of the queue")
	n.Proxies = []*datapathv1.ProxyStatus{{
		Proxy: netv1.Proxy_PROXY_DNS, Device: "slp0", Problem: "open /dev/net/tun: no such file",
		TcpWaiting: true, TcpProblem: "no space",
	}}
	out, _ = n.Want(t, 0, "proxy", "status")
	nodetest.WantLines(t, out, "dns no - slp0 - waiting 0", "Problem dns: open /dev/net/tun: no such file",
		"Problem dns, TCP: no space")
}
