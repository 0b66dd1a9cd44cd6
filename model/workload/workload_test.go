// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package workload

import (
	"encoding/json"
	"errors"
	"strings"
	"testing"
)

// TestStoredFormsStayWhatTheyAre: records and spooled deletions on the disks of nodes have these forms.
func TestStoredFormsStayWhatTheyAre(t *testing.T) {
	o := Owner{ContainerID: "abc", Interface: "eth0"}
	if o.String() != "abc/eth0" || o.Key() != "538f587a23655f38bbcd8344b3c3eab0963f28045c7aa32182e0c7ae75d90366" {
		t.Errorf("%s has the key %s", o, o.Key())
	}
	for _, c := range []struct {
		value any
		want  string
	}{
		{o, `{"containerId":"abc","interfaceName":"eth0"}`},
		{PodReference{"shop", "web-0", "u"}, `{"namespace":"shop","name":"web-0","uid":"u"}`},
		{NamedPort{"http", 80, TCP}, `{"name":"http","port":80,"protocol":6}`},
	} {
		if b, err := json.Marshal(c.value); err != nil || string(b) != c.want {
			t.Errorf("%v is stored as %s, %v, want %s", c.value, b, err, c.want)
		}
	}
}

func TestOwnersThatTheAPIRefusesAreRefused(t *testing.T) {
	long := Owner{strings.Repeat("a", 128), strings.Repeat("é", 7)}
	for _, good := range []Owner{{"a", "e"}, {"0a_.-", "eth0"}, long, {"a", "lo"}} {
		if err := good.Check(); err != nil {
			t.Errorf("%s: %v", good, err)
		}
	}
	for _, c := range []struct {
		owner Owner
		field string
	}{
		{Owner{"", "eth0"}, "container_id"},
		{Owner{"-a", "eth0"}, "container_id"},
		{Owner{"a/b", "eth0"}, "container_id"},
		{Owner{"é", "eth0"}, "container_id"},
		{Owner{"a\x00", "eth0"}, "container_id"},
		{Owner{strings.Repeat("a", 129), "eth0"}, "container_id"},
		{Owner{"a", ""}, "interface_name"},
		{Owner{"a", "sixteen-bytes-xx"}, "interface_name"},
		{Owner{"a", "a/b"}, "interface_name"},
		{Owner{"a", "a:b"}, "interface_name"},
		{Owner{"a", "a b"}, "interface_name"},
		{Owner{"a", "a\x00"}, "interface_name"},
	} {
		var e *OwnerError
		if err := c.owner.Check(); !errors.As(err, &e) || e.Field != c.field {
			t.Errorf("%q: error %v, want one about %s", c.owner.String(), err, c.field)
		}
	}
}
