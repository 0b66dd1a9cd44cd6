// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package frames

import (
	"encoding/binary"

	"golang.org/x/net/http2"
)

const (
	settingSize = 6
	maxEntries  = 64 // of a SETTINGS frame
)

// settings are the values of a SETTINGS frame that matter to the relay.
type settings struct {
	window    uint32 // initial window of streams
	hasWindow bool
}

// appendSettings appends a SETTINGS frame with changed values:
//
//   - header tables have size 0, and frames the default maximum size;
//   - the client accepts no pushed streams;
//   - the server allows at most MaxStreams streams.
//
// first is set for the first SETTINGS of an end.
func appendSettings(out, payload []byte, first, server bool) (_ []byte, s settings, code http2.ErrCode) {
	if len(payload)%settingSize != 0 {
		return out, s, http2.ErrCodeFrameSize
	}
	if len(payload) > maxEntries*settingSize {
		return out, s, http2.ErrCodeEnhanceYourCalm
	}
	start := len(out)
	out = appendHeader(out, 0, http2.FrameSettings, 0, 0)
	streams := first
	for p := payload; len(p) > 0; p = p[settingSize:] {
		id, value := http2.SettingID(binary.BigEndian.Uint16(p)), binary.BigEndian.Uint32(p[2:])
		if err := (http2.Setting{ID: id, Val: value}).Valid(); err != nil {
			if id == http2.SettingInitialWindowSize {
				return out, s, http2.ErrCodeFlowControl
			}
			return out, s, http2.ErrCodeProtocol
		}
		switch {
		case id == http2.SettingHeaderTableSize, id == http2.SettingMaxFrameSize:
			continue
		case id == http2.SettingEnablePush:
			if server && value != 0 {
				return out, s, http2.ErrCodeProtocol
			}
			continue
		case id == http2.SettingMaxConcurrentStreams && server:
			streams, value = false, min(value, MaxStreams)
		case id == http2.SettingInitialWindowSize:
			s.window, s.hasWindow = value, true
		}
		out = appendSetting(out, id, value)
	}
	if first {
		out = appendSetting(out, http2.SettingHeaderTableSize, 0)
		switch {
		case !server:
			out = appendSetting(out, http2.SettingEnablePush, 0)
		case streams:
			out = appendSetting(out, http2.SettingMaxConcurrentStreams, MaxStreams)
		}
	}
	length := len(out) - start - frameHeader
	out[start+1], out[start+2] = byte(length>>8), byte(length)
	return out, s, http2.ErrCodeNo
}

func appendSetting(out []byte, id http2.SettingID, value uint32) []byte {
	out = binary.BigEndian.AppendUint16(out, uint16(id))
	return binary.BigEndian.AppendUint32(out, value)
}

// pending counts a SETTINGS frame that waits for its acknowledgement, in fromClient or fromServer.
func (r *relay) pending(count *int, first bool) (code http2.ErrCode) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if *count >= MaxSettings {
		return http2.ErrCodeEnhanceYourCalm
	}
	*count++
	if !first { // the first one is counted from the start
		r.activity.add(1)
	}
	return http2.ErrCodeNo
}

// acknowledged is the opposite of pending.
func (r *relay) acknowledged(count *int) (code http2.ErrCode) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if *count == 0 {
		return http2.ErrCodeProtocol
	}
	*count--
	r.activity.add(-1)
	return http2.ErrCodeNo
}
