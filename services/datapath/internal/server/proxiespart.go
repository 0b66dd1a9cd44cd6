// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package server

import (
	"fmt"

	"github.com/prometheus/client_golang/prometheus"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/durationpb"
	"google.golang.org/protobuf/types/known/timestamppb"

	datapathv1 "github.com/sluice-net/sluice/proto/gen/sluice/datapath/v1"
	netv1 "github.com/sluice-net/sluice/proto/gen/sluice/net/v1"
	"github.com/sluice-net/sluice/services/datapath/internal/proxy"
)

// ProxyAttachment returns the message with which a proxy receives the queue of its device.
func ProxyAttachment(a proxy.Attachment) ([]byte, error) {
	message, err := proto.Marshal(&datapathv1.ProxyAttachment{
		Proxy: netv1.Proxy(a.Kind), TapDevice: a.Device, TapMtu: a.MTU, HeartbeatOffset: a.HeartbeatOffset,
	})
	if err != nil {
		return nil, fmt.Errorf("encode the message for a proxy: %w", err)
	}
	return message, nil
}

// ProxyRequest returns the request of a proxy's message.
func ProxyRequest(b []byte) (r proxy.Request, err error) {
	m := &datapathv1.ProxyRequest{}
	if err := proto.Unmarshal(b, m); err != nil {
		return r, fmt.Errorf("decode the request of a proxy: %w", err)
	}
	r.Namespace = m.GetNamespace() != nil
	r.Sockets, r.IPv6 = int(m.GetSockets().GetCount()), m.GetSockets().GetIpv6()
	return r, nil
}

// ProxyReply returns the message of a reply to a proxy.
func ProxyReply(r proxy.Reply) ([]byte, error) {
	m := &datapathv1.ProxyReply{}
	switch {
	case r.Problem != "":
		m.Reply = &datapathv1.ProxyReply_Problem{Problem: r.Problem}
	case r.Device != "":
		m.Reply = &datapathv1.ProxyReply_Namespace{Namespace: &datapathv1.ProxyNamespace{Device: r.Device, Ipv6: r.IPv6}}
	default:
		m.Reply = &datapathv1.ProxyReply_Sockets{Sockets: &datapathv1.ProxySockets{
			Count: uint32(r.Sockets), Ipv6: r.IPv6, //nolint:gosec // at most proxyns.MaxSockets
		}}
	}
	message, err := proto.Marshal(m)
	if err != nil {
		return nil, fmt.Errorf("encode the reply to a proxy: %w", err)
	}
	return message, nil
}

// ProxiesPart describes the proxies.
type ProxiesPart struct{ Proxies }

// Proxies are the kinds of proxies.
type Proxies interface {
	Status() ([]proxy.Status, error)
}

var (
	proxyDesc      = desc("proxy_attached", "1 if a proxy of the kind is attached, else 0.", "proxy")
	proxySinceDesc = desc("proxy_attached_timestamp_seconds", "When the proxy was attached; absent without one.",
		"proxy")
	proxyHeartbeatDesc = desc("proxy_heartbeat_age_seconds",
		"Time since the last heartbeat of the proxy; absent without a proxy, or before its first one.", "proxy")
	proxyUsableDesc = desc("proxy_usable",
		"1 if a proxy of the kind can be attached, 0 if its device cannot be made.", "proxy")
	proxyTCPDesc   = desc("proxy_tcp_attached", "1 if the attached proxy accepts TCP connections, else 0.", "proxy")
	proxyTriesDesc = desc("proxy_connections_total",
		"Connections of proxies by result: attached, failed, or refused because of the user.", "proxy", "result")
	proxyReplacedDesc = desc("proxy_replaced_total", "Attached proxies that another process replaced.", "proxy")
)

func (p ProxiesPart) report(r *report) error {
	all, err := p.Status()
	for _, s := range all {
		r.Proxies = append(r.Proxies, proxyStatus(&s))
	}
	return err
}

func proxyStatus(s *proxy.Status) *datapathv1.ProxyStatus {
	m := &datapathv1.ProxyStatus{
		Proxy: netv1.Proxy(s.Kind), Attached: s.Attached, Pid: uint32(max(s.PID, 0)), Device: s.Device, Problem: s.Problem,
		Attachments: s.Attachments, TcpDevice: s.TCP.Device, TcpAttached: s.TCP.Attached, TcpWaiting: s.TCP.Waiting,
		TcpProblem: s.TCP.Problem,
	}
	if s.Attached {
		m.AttachedSince = timestamppb.New(s.Since)
	}
	if s.HeartbeatAge >= 0 {
		m.HeartbeatAge = durationpb.New(s.HeartbeatAge)
	}
	return m
}

// Describe implements prometheus.Collector.
func (ProxiesPart) Describe(ch chan<- *prometheus.Desc) {
	describe(ch, proxyDesc, proxySinceDesc, proxyHeartbeatDesc, proxyUsableDesc, proxyTCPDesc, proxyTriesDesc,
		proxyReplacedDesc)
}

// Collect implements prometheus.Collector.
func (p ProxiesPart) Collect(ch chan<- prometheus.Metric) {
	all, err := p.Status()
	if err != nil {
		ch <- prometheus.NewInvalidMetric(proxyDesc, err)
		return
	}
	for _, s := range all {
		collectProxy(ch, &s)
	}
}

func collectProxy(ch chan<- prometheus.Metric, s *proxy.Status) {
	kind := s.Kind.String()
	gauge(ch, proxyDesc, oneIf(s.Attached), kind)
	gauge(ch, proxyUsableDesc, oneIf(s.Problem == ""), kind)
	gauge(ch, proxyTCPDesc, oneIf(s.TCP.Attached), kind)
	if s.Attached {
		gauge(ch, proxySinceDesc, float64(s.Since.UnixNano())/1e9, kind)
	}
	if s.HeartbeatAge >= 0 {
		gauge(ch, proxyHeartbeatDesc, s.HeartbeatAge.Seconds(), kind)
	}
	counter(ch, proxyTriesDesc, s.Attachments, kind, "attached")
	counter(ch, proxyTriesDesc, s.Failed, kind, "failed")
	counter(ch, proxyTriesDesc, s.Refused, kind, "refused")
	counter(ch, proxyReplacedDesc, s.Replaced, kind)
}

func oneIf(yes bool) float64 {
	if yes {
		return 1
	}
	return 0
}
