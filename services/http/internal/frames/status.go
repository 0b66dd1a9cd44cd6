// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package frames

import (
	"strconv"

	"golang.org/x/net/http2/hpack"
)

// staticStatus are the values of the entries 8 to 14 of HPACK's static table.
var staticStatus = [...]int{200, 204, 206, 304, 400, 404, 500}

const (
	firstStatus = 8
	lastStatus  = firstStatus + len(staticStatus) - 1
)

// readStatus returns the status at the start of the header block of a response, or 0 if it has another first field. The
// header table of the server has size 0, so the field is a literal or in the static table, and no other field has to be
// decoded.
func readStatus(block []byte) int {
	for len(block) > 0 && block[0]&0xe0 == 0x20 { // size of the table
		for n := 1; ; n++ {
			if n >= len(block) || block[0]&0x1f != 0x1f || block[n]&0x80 == 0 {
				block = block[min(n+btoi(block[0]&0x1f == 0x1f), len(block)):]
				break
			}
		}
	}
	if len(block) == 0 {
		return 0
	}
	var name int
	switch b := block[0]; {
	case b&0x80 != 0:
		if n := int(b & 0x7f); n >= firstStatus && n <= lastStatus {
			return staticStatus[n-firstStatus]
		}
		return 0
	case b&0x40 != 0:
		name = int(b & 0x3f)
	default:
		name = int(b & 0x0f)
	}
	value := block[1:]
	if name == 0 {
		var text string
		if text, value = literal(value); text != ":status" {
			return 0
		}
	} else if name < firstStatus || name > lastStatus {
		return 0
	}
	text, _ := literal(value)
	n, err := strconv.Atoi(text)
	if err != nil || len(text) != 3 || n < 100 {
		return 0
	}
	return n
}

func btoi(b bool) int {
	if b {
		return 1
	}
	return 0
}

// literal reads a short text.
func literal(b []byte) (text string, rest []byte) {
	if len(b) == 0 || int(b[0]&0x7f) > len(b)-1 || b[0]&0x7f == 0x7f {
		return "", nil
	}
	n := int(b[0] & 0x7f)
	text, rest = string(b[1:1+n]), b[1+n:]
	if b[0]&0x80 != 0 {
		var err error
		if text, err = hpack.HuffmanDecodeToString([]byte(text)); err != nil {
			return "", nil
		}
	}
	return text, rest
}
