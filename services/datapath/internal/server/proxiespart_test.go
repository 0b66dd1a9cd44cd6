// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package server

import (
	"maps"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/durationpb"
	"google.golang.org/protobuf/types/known/timestamppb"

	"github.com/sluice-net/sluice/model/policytable"
	datapathv1 "github.com/sluice-net/sluice/proto/gen/sluice/datapath/v1"
	netv1 "github.com/sluice-net/sluice/proto/gen/sluice/net/v1"
	"github.com/sluice-net/sluice/services/datapath/internal/proxy"
)

type fixedProxy proxy.Status

func (p fixedProxy) Status() ([]proxy.Status, error) { return []proxy.Status{proxy.Status(p)}, nil }

var (
	attachedProxy = proxy.Status{
		Kind: policytable.ProxyDNS, Device: "slp0", Attached: true, Since: time.Unix(5, 0), PID: 9,
		HeartbeatAge: 1500 * time.Microsecond, Attachments: 4, Replaced: 1, Refused: 2, Failed: 3,
	}
	silentProxy = proxy.Status{
		Kind: policytable.ProxyDNS, Device: "slp0", Attached: true, Since: time.Unix(5, 0), HeartbeatAge: -1,
	}
	unusableProxy = proxy.Status{
		Kind: policytable.ProxyDNS, Device: "slp0", HeartbeatAge: -1, Problem: "open /dev/net/tun",
	}
)

func TestStatusDescribesTheProxies(t *testing.T) {
	for _, c := range []struct {
		is   proxy.Status
		want *datapathv1.ProxyStatus
	}{
		{attachedProxy, &datapathv1.ProxyStatus{
			Proxy: netv1.Proxy_PROXY_DNS, Attached: true, AttachedSince: timestamppb.New(time.Unix(5, 0)), Pid: 9,
			Device: "slp0", HeartbeatAge: durationpb.New(1500 * time.Microsecond), Attachments: 4,
		}},
		{silentProxy, &datapathv1.ProxyStatus{
			Proxy: netv1.Proxy_PROXY_DNS, Attached: true, AttachedSince: timestamppb.New(time.Unix(5, 0)), Device: "slp0",
		}},
		{unusableProxy, &datapathv1.ProxyStatus{
			Proxy: netv1.Proxy_PROXY_DNS, Device: "slp0", Problem: "open /dev/net/tun",
		}},
	} {
		r := &report{GetStatusResponse: &datapathv1.GetStatusResponse{}}
		if err := (ProxiesPart{fixedProxy(c.is)}).report(r); err != nil {
			t.Fatal(err)
		}
		if len(r.Proxies) != 1 || !proto.Equal(r.Proxies[0], c.want) {
			t.Errorf("status %v\nwant   %v", r.Proxies, c.want)
		}
	}
}

func TestMetricsDescribeTheProxies(t *testing.T) {
	connections := func(attached, failed, refused float64) map[string]float64 {
		return map[string]float64{
			"sluice_datapath_proxy_connections_total attached": attached,
			"sluice_datapath_proxy_connections_total failed":   failed,
			"sluice_datapath_proxy_connections_total refused":  refused,
		}
	}
	for _, c := range []struct {
		is   proxy.Status
		want map[string]float64
		of   map[string]float64
	}{
		{attachedProxy, map[string]float64{
			"sluice_datapath_proxy_attached": 1, "sluice_datapath_proxy_usable": 1, "sluice_datapath_proxy_replaced_total": 1,
			"sluice_datapath_proxy_attached_timestamp_seconds": 5, "sluice_datapath_proxy_heartbeat_age_seconds": 0.0015,
		}, connections(4, 3, 2)},
		{silentProxy, map[string]float64{
			"sluice_datapath_proxy_attached": 1, "sluice_datapath_proxy_usable": 1, "sluice_datapath_proxy_replaced_total": 0,
			"sluice_datapath_proxy_attached_timestamp_seconds": 5,
		}, connections(0, 0, 0)},
		{unusableProxy, map[string]float64{
			"sluice_datapath_proxy_attached": 0, "sluice_datapath_proxy_usable": 0, "sluice_datapath_proxy_replaced_total": 0,
		}, connections(0, 0, 0)},
	} {
		r := prometheus.NewPedanticRegistry()
		if err := r.Register(collectors{ProxiesPart{fixedProxy(c.is)}}); err != nil {
			t.Fatal(err)
		}
		families, err := r.Gather()
		if err != nil {
			t.Fatal(err)
		}
		got := map[string]float64{}
		for _, f := range families {
			for _, m := range f.GetMetric() {
				name := f.GetName()
				for _, l := range m.GetLabel() {
					if l.GetName() == "result" {
						name += " " + l.GetValue()
					} else if l.GetName() != "proxy" || l.GetValue() != "dns" {
						t.Errorf("%s has the label %v", name, l)
					}
				}
				got[name] = m.GetGauge().GetValue() + m.GetCounter().GetValue()
			}
		}
		maps.Copy(c.want, c.of)
		c.want["sluice_datapath_proxy_tcp_attached"] = oneIf(c.is.TCP.Attached)
		if !maps.Equal(got, c.want) {
			t.Errorf("metrics %v\nwant    %v", got, c.want)
		}
	}
}

func TestAttachmentOfAProxy(t *testing.T) {
	message, err := ProxyAttachment(proxy.Attachment{
		Kind: policytable.ProxyDNS, Device: "slp0", MTU: 9000, HeartbeatOffset: 8,
	})
	if err != nil {
		t.Fatal(err)
	}
	var got datapathv1.ProxyAttachment
	if err := proto.Unmarshal(message, &got); err != nil {
		t.Fatal(err)
	}
	want := &datapathv1.ProxyAttachment{Proxy: netv1.Proxy_PROXY_DNS, TapDevice: "slp0", TapMtu: 9000, HeartbeatOffset: 8}
	if !proto.Equal(&got, want) {
		t.Errorf("message %v, want %v", &got, want)
	}
}
