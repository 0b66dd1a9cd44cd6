// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package invocation

import (
	"net/netip"
	"reflect"
	"strings"
	"testing"

	"github.com/sluice-net/sluice/model/workload"
)

func TestPortMappingsAreRead(t *testing.T) {
	in, err := Parse(Add, env(), []byte(doc(`"capabilities":{"portMappings":true},"runtimeConfig":{"portMappings":[
		{"hostPort":8080,"containerPort":80,"protocol":"tcp"},
		{"hostPort":0,"containerPort":9000,"protocol":"tcp"},
		{"hostPort":53,"containerPort":5353,"protocol":"UDP","hostIP":"192.0.2.1"},
		{"hostPort":5000,"containerPort":5000,"protocol":"SCTP","hostIP":"2001:db8::1"},
		{"hostPort":81,"containerPort":81,"hostIP":""},
		{"hostPort":82,"containerPort":82,"hostIP":"::ffff:192.0.2.1"},
		{"hostPort":65535,"containerPort":1,"protocol":"tcp","hostIP":"0.0.0.0"}
	]}`)))
	if err != nil {
		t.Fatal(err)
	}
	want := []PortMapping{
		{HostPort: 8080, ContainerPort: 80, Protocol: workload.TCP},
		{HostPort: 53, ContainerPort: 5353, Protocol: workload.UDP, HostIP: netip.MustParseAddr("192.0.2.1")},
		{HostPort: 5000, ContainerPort: 5000, Protocol: workload.SCTP, HostIP: netip.MustParseAddr("2001:db8::1")},
		{HostPort: 81, ContainerPort: 81, Protocol: workload.TCP},
		{HostPort: 82, ContainerPort: 82, Protocol: workload.TCP, HostIP: netip.MustParseAddr("192.0.2.1")},
		{HostPort: 65535, ContainerPort: 1, Protocol: workload.TCP, HostIP: netip.IPv4Unspecified()},
	}
	if !reflect.DeepEqual(in.Config.PortMappings, want) {
		t.Errorf("port mappings %+v, want %+v", in.Config.PortMappings, want)
	}
}

// TestWrongPortMappingsNameTheirField: a runtime shows the message to the author of the container's ports.
func TestWrongPortMappingsNameTheirField(t *testing.T) {
	ok := `{"hostPort":1,"containerPort":1},`
	for mapping, want := range map[string]string{
		`{"hostPort":-1,"containerPort":1}`:                                       "[1].hostPort: -1 ",
		`{"hostPort":65536,"containerPort":1}`:                                    "[1].hostPort: 65536 ",
		`{"hostPort":1}`:                                                          "[1].containerPort: 0 ",
		`{"hostPort":1,"containerPort":70000}`:                                    "[1].containerPort: 70000 ",
		`{"hostPort":1,"containerPort":1,"protocol":"icmp"}`:                      `[1].protocol: "icmp"`,
		`{"hostPort":1,"containerPort":2,"protocol":"sctp"}`:                      "[1].containerPort: 2 ",
		`{"hostPort":1,"containerPort":1,"hostIP":"node"}`:                        `[1].hostIP: "node"`,
		`{"hostPort":1,"containerPort":1,"hostIP":"fe80::1%eth0"}`:                "[1].hostIP",
		`{"hostPort":1,"containerPort":1,"hostIP":"224.0.0.1"}`:                   "[1].hostIP",
		`{"hostPort":"1","containerPort":1}`:                                      ".hostPort: must be a number, and is a string",
		`7`:                                                                       ": must be an object, and is a number",
		strings.Repeat(`{"hostPort":1,"containerPort":1},`, 255) + ok[:len(ok)-1]: ": 257 ports",
	} {
		_, err := Parse(Add, env(), []byte(doc(`"runtimeConfig":{"portMappings":[`+ok+mapping+`]}`)))
		if code(t, err) != 7 || !strings.Contains(err.Error(), "runtimeConfig.portMappings"+want) {
			t.Errorf("%.60s: %v, want code 7 about runtimeConfig.portMappings%s", mapping, err, want)
		}
	}
}
